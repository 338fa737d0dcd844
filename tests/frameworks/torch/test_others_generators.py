"""Engines and collectors of others take the weights of a training: TorchRL's, vLLM's. And trainers of transformers and TRL give them.

Each test runs on the real library, or is skipped and says that this is missing; none has a stand-in for an interface. `make
test-frameworks` has TorchRL, transformers and TRL. vLLM's wheel of 336 MB is not in it; without a GPU, that and what it imports at once
will do: `.venv-frameworks/bin/pip install --no-deps vllm pyzmq cbor2 openai openai-harmony sniffio`.

vLLM's engine is made by vLLM's own factory and base class, and loads into a model that stands for one of vLLM's: a whole LLM, and the
layers that `start_weight_update` and `finish_weight_update` make ready, need a GPU and are not run here.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: `make test-frameworks` has it")
nn = torch.nn

import lockstep.torch as lt
import worker_client
from ps_protocol.errors import DeadlineExceeded, NotInitialized
from tests.frameworks.torch.test_others_loops import NET
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.shape import Shape
from tests.support.processes.commands import up
from tests.support.waiting import wait_until


class Trainer:
    """A training by lockstep.torch that followers reach by an address."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        torch.manual_seed(1)
        self.cluster = ServedCluster(Shape(num_ps=2), stack, directory=directory)
        self.address = self.cluster.chief_address
        # Wide enough that its weight is split over the servers.
        self.model = made()
        session = stack.enter_context(closing(worker_client.connect(self.address, timeout_s=20)))
        self.optimizer = lt.Optimizer(session, self.model, torch.optim.AdamW(self.model.parameters(), lr=1e-2))

    def step(self) -> int:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 7)).square().mean().backward()
        self.optimizer.step()
        return int(self.optimizer.global_step)

    def check(self, module: Any) -> None:
        for ours, theirs in zip(self.model.parameters(), module.parameters(), strict=True):
            assert torch.equal(ours.to(theirs.dtype), theirs)


@pytest.fixture
def trainer(socket_dir: Path) -> Iterator[Trainer]:
    with ExitStack() as stack:
        yield Trainer(socket_dir, stack)


def made(dtype: Any = torch.float32) -> Any:
    return nn.Sequential(nn.Linear(7, 200), nn.Tanh(), nn.Linear(200, 7)).to(dtype)


def test_a_module_follows_by_an_address_in_its_own_type(trainer: Trainer) -> None:
    module = made(torch.bfloat16)
    trainer.step()
    with lt.follow(module, trainer.address) as follower:
        assert follower.swap(timeout_s=20) == 1
        trainer.check(module)
        num_words = sum(one.numel() for one in module.parameters())
        assert follower.weights.received_bytes < 3 * num_words, "two bytes an element, and little more"


# -- TorchRL


@pytest.fixture
def torchrl() -> Any:
    return pytest.importorskip("torchrl.collectors", reason="TorchRL is not installed: pip install torchrl")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_collector_of_torchrl_has_the_newest_policy_at_each_batch(trainer: Trainer, torchrl: Any) -> None:
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import Collector
    from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv

    from lockstep.torch.torchrl import LockstepWeightSyncScheme

    policy = TensorDictModule(made(), in_keys=["observation"], out_keys=["action"])
    names = {f"module.{name}": name for name, _ in trainer.model.named_parameters()}
    more = {"frames_per_batch": 4, "total_frames": 12, "auto_register_policy_transforms": False}
    collector = Collector(lambda: ContinuousActionVecMockEnv(), policy, **more)
    scheme = LockstepWeightSyncScheme(trainer.address, max_lag=0, names=names, timeout_s=20)
    collector.register_scheme_receiver({"policy": scheme})
    trainer.check(policy)
    for batch in collector:
        with torch.no_grad():
            torch.testing.assert_close(batch["action"], trainer.model(batch["observation"]), msg="made by the weights of this step")
        step = trainer.step()

        def has_step(step: int = step) -> bool:
            collector.receive_weights()
            return scheme.follower is not None and scheme.follower.weights.step == step

        wait_until(has_step)
        trainer.check(policy)
    collector.shutdown()
    scheme.shutdown()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scheme_of_torchrl_says_what_it_is_not_for(torchrl: Any) -> None:
    from lockstep.torch.torchrl import LockstepWeightSyncScheme

    with pytest.raises(RuntimeError, match="not from a collector: give it to the collector of each process"):
        LockstepWeightSyncScheme("unix:/nowhere").init_on_sender(model_id="policy", context=None)
    with pytest.raises(RuntimeError, match="is not connected"):
        LockstepWeightSyncScheme("unix:/nowhere").receive()


# -- vLLM


class Model(nn.Module):  # type: ignore[misc, name-defined]
    """Loads weights as models of vLLM do: a fused layer of what a checkpoint has apart."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(207, dtype=torch.bfloat16))
        self.loads: list[list[str]] = []

    def load_weights(self, weights: Any) -> None:
        found = dict(weights)
        self.loads.append(sorted(found))
        with torch.no_grad():
            self.fused.copy_(torch.cat([found["0.bias"], found["2.bias"]]))


def engine_of(model: Any) -> Any:
    pytest.importorskip("vllm.distributed.weight_transfer", reason="vLLM is not installed: pip install vllm")
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from lockstep.torch.vllm import register

    if "lockstep" not in WeightTransferEngineFactory._registry:
        register()
    config = SimpleNamespace(parallel_config=None, model_config=None)
    return WeightTransferEngineFactory.create_engine(WeightTransferConfig(backend="lockstep"), config, torch.device("cpu"), model)


def test_an_engine_of_vllm_loads_each_step_whole(trainer: Trainer) -> None:
    model = Model()
    engine = engine_of(model)
    engine.init_transfer_engine(engine.parse_init_info({"chief": trainer.address, "timeout_s": 20.0}))
    for _ in range(3):
        step = trainer.step()
        engine.receive_weights(engine.parse_update_info({"step": step, "timeout_s": 20.0}))
        assert engine.version.step == step
        expected = torch.cat([trainer.model[0].bias, trainer.model[2].bias]).bfloat16()
        assert torch.equal(model.fused, expected)
    assert model.loads == [["0.bias", "0.weight", "2.bias", "2.weight"]] * 3, "a layer that is made anew needs all of its weights"
    engine.shutdown()


def test_an_engine_of_vllm_says_what_is_missing(trainer: Trainer) -> None:
    engine = engine_of(Model())
    with pytest.raises(NotInitialized, match="call init_weight_transfer_engine"):
        engine.receive_weights(engine.parse_update_info({}))
    with pytest.raises(ValueError, match="Invalid init_info for LockstepWeightTransferEngine"):
        engine.parse_init_info({"adress": trainer.address})
    engine.init_transfer_engine(engine.parse_init_info({"chief": trainer.address, "timeout_s": 20.0}))
    with pytest.raises(DeadlineExceeded, match="step 5 is wanted"):
        engine.receive_weights(engine.parse_update_info({"step": 5, "timeout_s": 0.3}))
    assert engine.model.loads == [], "nothing was loaded"
    engine.shutdown()


def test_workers_of_one_model_of_vllm_wait_for_the_step_of_the_others(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(Model())
    from lockstep.torch import vllm

    rounds: list[Any] = []

    def of_all_workers(version: Any) -> list[Any]:
        """The other worker has step 1 already."""
        rounds.append(version)
        if len(rounds) == 1:
            trainer.step()
        return [version, version._replace(step=1)]

    monkeypatch.setattr(vllm, "_of_all_workers", of_all_workers)
    engine.init_transfer_engine(engine.parse_init_info({"chief": trainer.address, "timeout_s": 20.0}))
    engine.receive_weights(engine.parse_update_info({"timeout_s": 20.0}))
    assert [version.step for version in rounds] == [0, 1]
    assert engine.version.step == 1
    monkeypatch.setattr(vllm, "_of_all_workers", lambda version: [version, None])
    with pytest.raises(NotInitialized, match="another worker of this model got no weights"):
        engine.receive_weights(engine.parse_update_info({}))
    assert len(engine.model.loads) == 1
    engine.shutdown()


# -- transformers

CHECKED = """
import os, sys, warnings
os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore")
import torch, lockstep, lockstep.torch as lt
from torch import nn
from transformers import TrainerCallback
from lockstep.torch.transformers import PublishCallback
torch.set_num_threads(1)
torch.manual_seed(0)

class Check(TrainerCallback):
    # what a generator has is what the Trainer has, after each step
    def on_step_end(self, args, state, control, model=None, **more):
        if generator.weights.is_over:
            return
        step = generator.swap(step=state.global_step, timeout_s=20)
        same = all(torch.equal(a.bfloat16(), b) for a, b in zip(model.parameters(), followed.parameters()))
        print("step", step, "of", state.global_step, "same" if same else "other", flush=True)

how = dict(output_dir=sys.argv[1], max_steps=5, per_device_train_batch_size=4, gradient_accumulation_steps=2, use_cpu=True, report_to=[],
           save_strategy="no", disable_tqdm=True, logging_strategy="no")
"""
OF_TRANSFORMERS = (
    NET
    + """
model, followed = Net(), Net().bfloat16()
x = torch.randn(64, 4)
samples = [{"x": one, "labels": one.sum(0, keepdim=True)} for one in x]
trainer = Trainer(model=model, args=TrainingArguments(**how), train_dataset=samples, callbacks=[PublishCallback(), Check()])
"""
)
# A language model from a configuration, whose words are numbers: nothing is downloaded.
OF_TRL = """
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

words = ["<pad>", "</s>", "<unk>", *map(str, range(29))]
tokens = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
tokens.pre_tokenizer = pre_tokenizers.Whitespace()
named = dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
shape = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
                    pad_token_id=0, eos_token_id=1, bos_token_id=None)
model, followed = LlamaForCausalLM(shape), LlamaForCausalLM(shape).bfloat16()
more = dict(model=model, processing_class=PreTrainedTokenizerFast(tokenizer_object=tokens, **named), callbacks=[PublishCallback(), Check()])
if sys.argv[2] == "sft":
    trainer = SFTTrainer(args=SFTConfig(bf16=False, **how), train_dataset=Dataset.from_dict({"text": ["1 2 3 4 5 6"] * 64}), **more)
else:
    trainer = GRPOTrainer(args=GRPOConfig(bf16=False, num_generations=4, max_completion_length=4, learning_rate=1e-2, **how),
                          reward_funcs=lambda completions, **_: [float(len(set(text.split()))) for text in completions],
                          train_dataset=Dataset.from_dict({"prompt": ["1 2 3"] * 64}), **more)
"""
TRAINED = """
generator = lt.follow(followed)
trainer.train()
generator.weights.close()
print("done", flush=True)
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("library", "program", "which"), [("transformers", OF_TRANSFORMERS, ""), ("trl", OF_TRL, "sft"), ("trl", OF_TRL, "grpo")]
)
def test_a_trainer_of_transformers_and_those_of_trl_publish_each_step(tmp_path: Path, library: str, program: str, which: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed: `make test-frameworks` has it")
    given = ("--ps", "1", "--workers", "1", "--", str(tmp_path / "out"), which)
    with up(*given, worker=CHECKED + program + TRAINED, run_dir=tmp_path / "run") as process:
        said, _ = process.communicate(timeout=150)
    assert process.returncode == 0, said
    for step in range(1, 6):
        assert f"step {step} of {step} same" in said, said
    assert "done" in said
