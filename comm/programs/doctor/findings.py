"""What is wrong with the ranks of a job, from the facts alone: one function a rule."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from ipaddress import ip_interface
from typing import TypeVar

from bagua_kernels.comm.programs.doctor.facts import Finding, Level, Measurements, RankFacts

T = TypeVar("T")

_CLOCK_LIMIT = 0.1  # seconds, beyond which the lines of several logs are out of order
_SLOW_LINK = 0.5  # of the usual bandwidth
_SLOW_RANK = 1.5  # times the usual time


def diagnose(
    world_size: int, ranks: Sequence[RankFacts], measured: Measurements | None = None, missing: Iterable[int] = ()
) -> tuple[Finding, ...]:
    """Returns what is wrong, errors first; reads nothing but its arguments.

    Args:
        world_size: the number of ranks of the job.
        ranks: the facts of those that arrived.
        measured: what they measured, if they could.
        missing: those that did not arrive.
    """
    found = list(_absent(world_size, sorted(missing)))
    for rule in _RULES:
        if world_size > 1 or rule not in _BETWEEN:
            found += rule(ranks)
    if measured is not None:
        for check in _CHECKS:
            found += check(ranks, measured)
    return tuple(sorted(found, key=lambda finding: finding.level))


def _absent(world_size: int, missing: Sequence[int]) -> Iterator[Finding]:
    if missing:
        what = f"{_named(missing)} did not join the {world_size} of the job in time"
        fix = "see that they started, with the same MASTER_ADDR and MASTER_PORT, and that no firewall blocks that port"
        fix += "; --timeout waits longer"
        yield Finding("error", tuple(missing), what, "every collective waits for every rank", fix)


def _failed(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for problem, group in _groups(ranks, lambda one: one.problem):
        if problem:
            why = "without connections nothing can be trained"
            fix = "see the other findings; else let all ports through between the hosts, and set GLOO_SOCKET_IFNAME"
            yield Finding("error", _ids(group), f"{_named(_ids(group))} failed: {problem}", why, fix)


def _wrong_interface(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for key, group in _groups(ranks, lambda one: (one.network.choice, one.network.best, one.host)):
        choice, best, host = key
        wanted = f"GLOO_SOCKET_IFNAME={best}" if best else "GLOO_SOCKET_IFNAME to an interface with an address"
        if choice.reason == "GLOO_SOCKET_IFNAME" and choice.problem:
            what = f"{_named(_ids(group))}: GLOO_SOCKET_IFNAME={choice.name} cannot be used: {choice.problem}"
            yield Finding("error", _ids(group), what, "Gloo fails to start", f"set {wanted}, or unset it")
            continue
        used = group[0].network.used
        if not _several_hosts(ranks) or not used.stays_inside:
            continue
        how, fix = f"{choice.reason} led there", f"set {wanted}"
        if choice.reason == "MASTER_ADDR":
            fix = "set MASTER_ADDR to an address of rank 0's host that the other hosts reach"
        elif choice.reason == "hostname":
            how = f"the hostname {host} resolves to it, as in /etc/hosts of Debian (127.0.1.1)"
            fix += f", or let {host} resolve to an address of that interface"
        elif choice.problem:
            how = choice.problem
        verb = "uses" if len(group) == 1 else "use"
        what = f"{_named(_ids(group))} {verb} {choice.name} ({choice.address}): {how}"
        yield Finding("error", _ids(group), what, "other hosts cannot be reached through it", fix)


def _elsewhere(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for facts in ranks:
        choice = facts.network.choice
        others = sorted(set(facts.listening) - {choice.address})
        wrong = _several_hosts(ranks) and facts.network.used.stays_inside  # then to insist on it would not help
        if others and choice.address and ":" not in choice.address and not wrong:
            what = f"rank {facts.rank} takes {', '.join(others)} beside or instead of {choice.address}"
            why = f"{choice.reason} asks for {choice.name}; the traffic goes over another interface"
            fix = f"let the hostname {facts.host} resolve to {choice.address}, for instance in /etc/hosts"
            yield Finding("error" if _several_hosts(ranks) else "warning", (facts.rank,), what, why, fix)


def _two_addresses(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for facts in ranks:
        gloo = facts.network.choice.address
        if gloo and facts.sockets and gloo != facts.sockets:
            what = f"rank {facts.rank}: Gloo takes {gloo}, this package's own sockets {facts.sockets}"
            why = "one of them may go over a slower network, or not get through at all"
            wanted = facts.network.best
            fix = f"set GLOO_SOCKET_IFNAME={wanted}, which both follow" if wanted else "set GLOO_SOCKET_IFNAME"
            yield Finding("warning", (facts.rank,), what, why, fix)


def _subnets(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    networks = {}
    for facts in ranks:
        used, address = facts.network.used, facts.network.choice.address
        own = [full for full in used.addresses if full.startswith(f"{address}/")]
        if own and _several_hosts(ranks) and not used.stays_inside:
            networks[facts.rank] = str(ip_interface(own[0]).network)
    usual = Counter(networks.values()).most_common(1)[0][0] if networks else ""
    odd = tuple(rank for rank, network in networks.items() if network != usual)
    if odd:
        where = ", ".join(sorted({networks[rank] for rank in odd}))
        what = f"{_named(odd)}: the address is in {where}, that of most ranks in {usual}"
        why = "the traffic passes a router, or nothing passes at all"
        fix = "set GLOO_SOCKET_IFNAME on each host to the interface in the network that all share, if there is one"
        yield Finding("warning", odd, what, why, fix)


def _versions(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for name in dict.fromkeys(name for one in ranks for name in one.versions):
        groups = _groups(ranks, partial(_version, name))
        if len(groups) > 1:
            usual = max(groups, key=lambda pair: len(pair[1]))[0]
            odd = _ids(one for one in ranks if _version(name, one) != usual)
            what = f"{name} differs: " + "; ".join(f"{version or 'none'} on {_named(_ids(g))}" for version, g in groups)
            level: Level = "error" if name in ("torch", "bagua-kernels") else "warning"
            why = "ranks that differ may exchange bytes that the others read in another way"
            yield Finding(level, odd, what, why, f"install the same version of {name} everywhere")


def _mtu(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    outward = [one for one in ranks if one.network.used.mtu and not one.network.used.is_loopback]
    groups = _groups(outward, lambda one: one.network.used.mtu)
    if len(groups) > 1:
        what = "the MTU differs: " + "; ".join(f"{mtu} on {_named(_ids(group))}" for mtu, group in groups)
        least = min(groups, key=lambda pair: pair[0])[0]
        fix = f"ip link set dev INTERFACE mtu {least} on the others, or the larger one everywhere, switches included"
        why = "large packets may be dropped, so that connections hang"
        yield Finding("warning", _ids(outward), what, why, fix)


def _threads(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for (host, _), group in _groups(ranks, _host):
        # Ranks may be pinned to CPUs of their own.
        cpus, threads = len({cpu for one in group for cpu in one.cpus}), sum(one.threads for one in group)
        if len(group) > 1 and threads > cpus:
            unset = [one.rank for one in group if "OMP_NUM_THREADS" not in one.network.variables]
            what = f"the {len(group)} ranks on {host} run {threads} threads on {cpus} CPUs"
            what += f"; OMP_NUM_THREADS is not set for {_named(unset)}" if unset else ""
            fix = f"set OMP_NUM_THREADS={max(1, cpus // len(group))}"
            if len(group) > cpus:
                fix += f", and start at most {cpus} ranks on a host"
            yield Finding("warning", _ids(group), what, "they take the CPUs from one another", fix)


def _backends(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for (host, _), group in _groups(ranks, _host):
        one, ids = group[0], _ids(group)
        major = one.cuda.split(".")[0]
        if "Gloo" in one.unavailable:
            what = f"Gloo is missing on {host}: {one.unavailable['Gloo']}"
            yield Finding("error", ids, what, "CPUs talk through Gloo", "install torch from its own wheel")
        if one.devices and not one.gpus:
            fix = "set CUDA_VISIBLE_DEVICES, and see nvidia-smi" if major else "install torch's build for CUDA"
            what = f"{host} has {one.devices} GPU(s), torch sees none"
            yield Finding("warning", ids, what, "training runs on the CPU", fix)
        if one.gpus and len(group) > len(one.gpus):
            what = f"{host} has {len(one.gpus)} GPU(s) for {len(group)} ranks"
            fix = f"start torchrun with --nproc-per-node {len(one.gpus)}, or pass device='cpu' to comm.init"
            yield Finding("error", ids, what, "each rank needs a GPU of its own", fix)
        if one.gpus and "NCCL" in one.unavailable:
            fix = f"install torch with NCCL: the Linux wheel for CUDA {major}"
            what = f"NCCL is missing on {host}: {one.unavailable['NCCL']}"
            yield Finding("error", ids, what, "GPUs talk through NCCL", fix)
        if one.gpus and "CuPy's NCCL" in one.unavailable:
            what = "CuPy's NCCL is missing on {}: {}".format(host, one.unavailable["CuPy's NCCL"])
            fix = f"pip install cupy-cuda{major}x nvidia-nccl-cu{major}"
            yield Finding("warning", ids, what, "the communicator over CuPy cannot be used", fix)


def _links(ranks: Sequence[RankFacts], measured: Measurements) -> Iterator[Finding]:
    """Compares links within hosts with one another, and links between hosts with one another."""
    where, rates = {one.rank: _host(one) for one in ranks}, measured.bandwidth
    everyone = range(len(rates))
    for within in (True, False):
        links = [(a, b) for a in everyone for b in everyone if a != b and (where.get(a) == where.get(b)) is within]
        own = {r: [rates[a][b] for a, b in links if r in (a, b)] for r in everyone}
        typical = {r: statistics.median_high(values) for r, values in own.items() if values}
        if not typical:
            continue
        usual = statistics.median_high(typical.values())
        slow = tuple(r for r, rate in typical.items() if rate < _SLOW_LINK * usual)
        kind = "within the host" if within else "between hosts"
        why = "every collective is as slow as its slowest link"
        fix = "see cable, switch port, speed and duplex (ethtool), other traffic and GLOO_SOCKET_IFNAME"
        fix = "pin the ranks to cores of their own (taskset, numactl)" if within else fix
        if slow:
            most = _rate(max(typical[r] for r in slow))
            what = f"most links of {_named(slow)} {kind} are slow: typically {most}, where {_rate(usual)} are usual"
            yield Finding("warning", slow, what, why, fix)
        for a, b in links:
            if rates[a][b] < _SLOW_LINK * usual and a not in slow and b not in slow:
                what = f"the link from rank {a} to rank {b} {kind} carries {_rate(rates[a][b])}"
                yield Finding("warning", tuple(sorted((a, b))), f"{what}, where {_rate(usual)} are usual", why, fix)


def _stragglers(_: Sequence[RankFacts], measured: Measurements) -> Iterator[Finding]:
    for name, seconds in (("matrix product", measured.matmul), ("copy of memory", measured.copy)):
        usual = statistics.median_low(seconds)
        slow = tuple(r for r, value in enumerate(seconds) if value > _SLOW_RANK * usual)
        if slow:
            times = ", ".join(f"{seconds[r] / usual:.1f}" for r in slow)
            what = f"{_named(slow)} took {times} times as long as usual for the same {name}"
            fix = "look for other processes, too many threads (OMP_NUM_THREADS), throttled clocks or a smaller machine"
            yield Finding("warning", slow, what, "all ranks wait for the slowest in every step", fix)


def _clocks(_: Sequence[RankFacts], measured: Measurements) -> Iterator[Finding]:
    off = {r: one for r, one in enumerate(measured.clocks) if abs(one.offset) - one.uncertainty > _CLOCK_LIMIT}
    if off:
        what = "; ".join(f"rank {r}'s clock is {one.offset:+.3f} s ahead of rank 0's" for r, one in off.items())
        fix = "start a time service on every host (chrony, systemd-timesyncd): timedatectl set-ntp true"
        yield Finding("warning", tuple(off), what, "the lines of several logs are out of order", fix)


def _windows(ranks: Sequence[RankFacts], measured: Measurements) -> Iterator[Finding]:
    """Looks for links that are longer than TCP's window: then a buffer, not the network, limits the bandwidth."""
    where, short, most = {one.rank: _host(one) for one in ranks}, [], 0.0
    for one in ranks:
        far = [r for r, host in where.items() if host != where[one.rank]]
        buffers = [size for size in (one.network.receive_buffer, one.network.send_buffer) if size]
        if not far or not buffers:
            continue
        trip = 2 * max(measured.latency[one.rank][r] for r in far)
        # What was measured cannot exceed the window; without the interface's own speed, half of it is suspicious.
        measured_twice = 2 * max(measured.bandwidth[one.rank][r] for r in far)
        product = trip * (one.network.used.speed * 125e3 or measured_twice)
        if product > min(buffers):
            short.append(one.rank)
            most = max(most, product)
    if short:
        size = 1 << math.ceil(math.log2(2 * most))
        what = f"bandwidth times round trip is {most / 1e6:.1f} MB for {_named(short)}, more than TCP's largest buffer"
        fix = f'sysctl -w net.ipv4.tcp_rmem="4096 131072 {size}" net.ipv4.tcp_wmem="4096 65536 {size}"'
        yield Finding("warning", tuple(short), what, "one connection cannot fill the link", fix)


def _liveness(_: Sequence[RankFacts], measured: Measurements) -> Iterator[Finding]:
    if not measured.watched:
        why = "when a rank dies, the error on the others will not name it"
        fix = "let all hosts connect to rank 0's host on any port; set MASTER_ADDR to an address of it that all reach"
        yield Finding("warning", (0,), "not all ranks could connect to rank 0's heartbeat store", why, fix)


# Causes come before the failures that they may have led to.
_RULES = (_wrong_interface, _elsewhere, _two_addresses, _subnets, _versions, _mtu, _threads, _backends, _failed)
_BETWEEN = (_elsewhere, _two_addresses, _subnets)  # they ask where traffic goes, and one rank alone sends none
_CHECKS = (_links, _stragglers, _clocks, _windows, _liveness)


def _groups(ranks: Iterable[RankFacts], key: Callable[[RankFacts], T]) -> list[tuple[T, list[RankFacts]]]:
    found: dict[T, list[RankFacts]] = {}
    for one in ranks:
        found.setdefault(key(one), []).append(one)
    return list(found.items())


def _version(name: str, one: RankFacts) -> str:
    return one.versions.get(name, "")


def _host(one: RankFacts) -> tuple[str, str]:
    return one.host, one.boot


def _several_hosts(ranks: Iterable[RankFacts]) -> bool:
    return len({_host(one) for one in ranks}) > 1


def _ids(ranks: Iterable[RankFacts]) -> tuple[int, ...]:
    return tuple(sorted(one.rank for one in ranks))


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _rate(rate: float) -> str:
    return f"{rate * 8e-6:.3g} Mbit/s" if rate < 125e6 else f"{rate * 8e-9:.3g} Gbit/s"
