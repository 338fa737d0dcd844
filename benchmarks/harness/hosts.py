"""Hosts of this machine's own, in network namespaces, with a switch between them whose links have a rate and a delay. Needs root.

Packets are real, with the kernel's TCP at both ends. The switch is a thread here, since few kernels have netem: it holds each packet for
as long as a link takes, and drops what waits longer than a router's buffer would hold it.
"""

import fcntl
import heapq
import itertools
import os
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

from benchmarks.harness.arguments import WrongArguments
from lockstep.launcher.hosts import Host

DEVICE = "eth0"
# From <linux/if_tun.h>. With the header of virtio the kernel gives and takes up to 64 KiB at once, as for a virtual machine: packets of
# 1,448 bytes each would take more calls than Python can make. Windows, acknowledgements and losses are those of the small packets.
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR, _TUN_F_CSUM, _TUN_F_TSO4 = 0x0001, 0x1000, 0x4000, 1, 2
_HEADER_BYTES, _MOST_BYTES = 10, 1 << 17
# What a host may send ahead of its link, which is when TCP there waits; and what a router holds before the receiver's link.
_AHEAD_S, _BUFFER_S = 0.005, 0.1
_LOOK_S = 0.05


class Hosts:
    """So many hosts with addresses, within a `with` block. Each sends and gets `rate` bytes a second, and a packet arrives `delay_s` later.

    `rate` and `delay_s` may be set at any time.
    """

    def __init__(self, number: int, *, rate: float, delay_s: float) -> None:
        self.number, self.rate, self.delay_s = number, rate, delay_s
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if os.geteuid() or shutil.which("ip") is None or shutil.which("nsenter") is None:
            raise WrongArguments("hosts in network namespaces need root, `ip` and `nsenter`")
        with ExitStack() as stack:
            devices = {socket.inet_aton(self.address(index)): self._host(stack, index) for index in range(self.number)}
            is_over = threading.Event()
            switch = threading.Thread(target=self._carry, args=(devices, is_over), name="switch", daemon=True)
            switch.start()
            stack.callback(switch.join)
            stack.callback(is_over.set)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    @staticmethod
    def address(index: int) -> str:
        """Where the others reach a host."""
        return f"10.79.0.{index + 1}"

    def on(self, index: int, command: Sequence[str]) -> list[str]:
        """Returns the command that runs another one on a host."""
        return ["nsenter", f"--net=/run/netns/{self._name(index)}", *command]

    def host(self, index: int) -> Host:
        """A host as a launcher takes it."""
        return Host(name=self._name(index), address=self.address(index), reach=tuple(self.on(index, ["sh", "-c"])))

    def _name(self, index: int) -> str:
        return f"lockstep-{os.getpid()}-{index}"

    def _host(self, stack: ExitStack, index: int) -> int:
        """Makes a host and returns the switch's end of its link."""
        name, link = self._name(index), f"l{os.getpid()}-{index}"
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "del", name)
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        stack.callback(os.close, device)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", link.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
        fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
        _ip("link", "set", link, "netns", name, "name", DEVICE)
        _ip("-n", name, "addr", "add", f"{self.address(index)}/24", "dev", DEVICE)
        for one in (DEVICE, "lo"):
            _ip("-n", name, "link", "set", one, "up")
        return device

    def _carry(self, devices: dict[bytes, int], is_over: threading.Event) -> None:
        # The network takes no part in what the computing of the hosts has to share.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)
        # When a host's link has sent all that it was given, and has delivered all that is on its way to it.
        sent, delivered = dict.fromkeys(devices.values(), 0.0), dict.fromkeys(devices.values(), 0.0)
        under_way: list[tuple[float, int, int, bytes]] = []
        numbers = itertools.count()
        while not is_over.is_set():
            now = time.monotonic()
            while under_way and under_way[0][0] <= now:
                _, _, to, packet = heapq.heappop(under_way)
                with suppress(OSError):  # the host has gone
                    os.write(to, packet)
            open_ones = [device for device, until in sent.items() if until - now < _AHEAD_S]
            nexts = [
                under_way[0][0] if under_way else now + 0.05,
                *(until - _AHEAD_S for until in sent.values() if until - now >= _AHEAD_S),
            ]
            for device in select.select(open_ones, [], [], max(0.0, min(nexts) - now))[0]:
                packet = os.read(device, _MOST_BYTES)
                to_or_none = devices.get(packet[_HEADER_BYTES + 16 : _HEADER_BYTES + 20])
                if to_or_none is None or packet[_HEADER_BYTES] >> 4 != 4:
                    continue  # such as IPv6's search for routers
                now, takes_s = time.monotonic(), (len(packet) - _HEADER_BYTES) / self.rate
                sent[device] = max(sent[device], now) + takes_s
                # The last byte arrives no earlier than it was sent, nor before what came earlier to the same host.
                if delivered[to_or_none] - sent[device] > _BUFFER_S:
                    continue
                delivered[to_or_none] = max(sent[device], delivered[to_or_none] + takes_s)
                heapq.heappush(under_way, (delivered[to_or_none] + self.delay_s, next(numbers), to_or_none, packet))


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
