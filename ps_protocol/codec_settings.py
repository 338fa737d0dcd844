"""Protobuf to checked values and back, for what is changed while a cluster trains: policy and optimizers. Knows messages; no RPC."""

from ps_protocol import codec, codec_variables
from ps_protocol.chief import HyperparameterChange, SettingsReply
from ps_protocol.policy_spec import PolicyName, PolicySpec, TokenMode, TooStale
from ps_protocol.v1 import chief_service_pb2 as pb


def encode_policy(policy: PolicySpec) -> pb.PolicySpec:
    """Encodes how workers are coordinated."""
    return pb.PolicySpec(
        name=f"NAME_{policy.name.name}",
        tokens=f"TOKENS_{policy.tokens.name}",
        num_tokens=None if policy.num_tokens < 0 else policy.num_tokens,
        replicas_to_aggregate=policy.replicas_to_aggregate,
        total_num_replicas=policy.total_num_replicas,
        staleness=policy.staleness,
        is_unlocked=not policy.use_locking,
        max_staleness=policy.max_staleness,
        too_stale=f"TOO_STALE_{policy.too_stale.name}",
    )


def decode_policy(message: pb.PolicySpec) -> PolicySpec:
    """Decodes and checks how workers are coordinated; what was left out is as in PolicySpec()."""
    return PolicySpec(
        name=codec.decode_choice(PolicyName, message.name or PolicyName.SYNC.value, field="policy.name"),
        tokens=codec.decode_choice(TokenMode, message.tokens or TokenMode.STRICT.value, field="policy.tokens"),
        num_tokens=message.num_tokens if message.HasField("num_tokens") else -1,
        replicas_to_aggregate=message.replicas_to_aggregate if message.HasField("replicas_to_aggregate") else None,
        total_num_replicas=message.total_num_replicas if message.HasField("total_num_replicas") else None,
        staleness=message.staleness,
        use_locking=not message.is_unlocked,
        max_staleness=message.max_staleness if message.HasField("max_staleness") else None,
        too_stale=codec.decode_choice(TooStale, message.too_stale or TooStale.DROP.value, field="policy.too_stale"),
    )


def encode_hyperparameter_change(change: HyperparameterChange) -> pb.SetHyperparametersRequest:
    """Encodes new values for an optimizer as a request, whose number and wait are the caller's to fill in."""
    rate = change.learning_rate
    return pb.SetHyperparametersRequest(
        variable=change.variable,
        learning_rate=None if rate is None else codec_variables.encode_schedule(rate),
        hyperparameters=change.hyperparameters,
    )


def decode_hyperparameter_change(message: pb.SetHyperparametersRequest) -> HyperparameterChange:
    """Decodes new values for an optimizer; whether they fit it can only be told beside the model."""
    return HyperparameterChange(
        variable=message.variable,
        learning_rate=codec_variables.decode_schedule(message.learning_rate) if message.HasField("learning_rate") else None,
        hyperparameters=dict(message.hyperparameters),
    )


def encode_settings_reply(reply: SettingsReply | None) -> pb.SettingsState | None:
    """Encodes what holds now; None (the moment has not come) stays out of the message."""
    return None if reply is None else pb.SettingsState(version=reply.version, step=reply.step)


def decode_settings_reply(message: pb.SetPolicyResponse | pb.SetHyperparametersResponse) -> SettingsReply | None:
    """Decodes what holds now; None if the moment has not come yet."""
    if not message.HasField("settings"):
        return None
    return SettingsReply(version=message.settings.version, step=message.settings.step)
