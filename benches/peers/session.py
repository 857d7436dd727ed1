# SPDX-License-Identifier: Apache-2.0
"""What is measured: kvferry, its limit and the peers, taking turns."""
import dataclasses
import os
import pathlib
import random
import statistics
import sys
import time

import install
from install import say
from process import Failed, Participant, cpu_ms

WORKERS = pathlib.Path(__file__).parent / "workers"
KIB, MIB = 1 << 10, 1 << 20
CASES = [(4 * KIB, 4096), (16 * KIB, 2048), (64 * KIB, 1024), (256 * KIB, 512), (MIB, 256), (256 * MIB, 1)]
QUICK_CASES = [(4 * KIB, 512), (64 * KIB, 64)]
SPIN_US = 2000
# NIXL's wheel crashes at exit without it where there is no InfiniBand.
NIXL = {"UCX_MODULES": "^ib"}
PARTS = ["transfers", "latency", "preparation", "status", "registration", "idle"]
REGIONS = [256, 1024, 4096, 10000]


@dataclasses.dataclass
class Peer:
    """A program of somebody else and how it is set up."""
    name: str
    package: str
    worker: str
    why: str
    environment: dict = dataclasses.field(default_factory=dict)
    arguments: list = dataclasses.field(default_factory=list)
    pinned: bool = False

    def settings(self):
        return {"package": self.package, "environment": self.environment, "arguments": self.arguments,
                "pinned": self.pinned, "what": self.why}


SAME_HOST = [
    Peer("nixl", "nixl", "nixl_pair.py", "READ, defaults: process_vm_readv (CMA), a call for each block; progress "
         "thread in the target only, which is faster than NIXL's default of both", NIXL, pinned=True),
    Peer("nixl_tuned", "nixl", "nixl_pair.py", "READ through UCX's shared FIFO, its fastest way: both CPUs are busy, "
         "and the death of the other process is not noticed",
         {**NIXL, "UCX_TLS": "posix", "UCX_POSIX_ERROR_HANDLING": "y"}, pinned=True),
]
TCP = [
    Peer("nixl", "nixl", "nixl_pair.py", "READ over TCP; progress thread in the target", {**NIXL, "UCX_TLS": "tcp"},
         pinned=True),
    Peer("mooncake", "mooncake", "mooncake_pair.py", "READ over TCP, defaults, which allow 1024 blocks at a time",
         {"MC_LOG_LEVEL": "ERROR"}, ["--split", "1024"]),
    Peer("mooncake_tuned", "mooncake", "mooncake_pair.py", "READ over TCP, one batch, 16 connections",
         {"MC_LOG_LEVEL": "ERROR", "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
          "MC_TCP_LANES_PER_PEER": "16"}),
]


@dataclasses.dataclass
class Way:
    """One way of kvferry, with the arguments of kvferry-bench."""
    transport: str
    memory: str
    waiting: str
    threads: int
    environment: dict = dataclasses.field(default_factory=dict)

    def arguments(self):
        return ["--transport", self.transport, "--memory", self.memory, "--threads", self.threads,
                "--spin-us", SPIN_US if self.waiting == "spinning" else 0]

    def name(self):
        return f"{self.transport}, {self.memory}, {self.waiting}"


class Session:
    """One run of everything."""

    def __init__(self, bench, options):
        self.bench, self.options = bench, options
        self.pool = options.pool_mib * MIB
        self.cases = QUICK_CASES if options.quick else CASES
        self.random = random.Random(1)
        self.missing, self.settings, self.packages = {}, {}, {}
        self.pythons, self.failed = {}, set()
        copying = min(2, len(os.sched_getaffinity(0)))
        both = ("blocking", "spinning")
        self.groups = [
            ([Way("shm", memory, "blocking", copying) for memory in ("pool", "own")], SAME_HOST),
            ([Way("unix", "pool", waiting, 1) for waiting in both], []),
            ([Way("tcp", "pool", waiting, 1) for waiting in both], TCP),
        ]
        # NIXL moves its bytes through UCX: the same lane for both.
        ucx = [Way("ucx", "own", waiting, 1, {"UCX_TLS": "tcp"}) for waiting in both]
        if self.has(ucx[0]):
            self.groups.append((ucx, TCP[:1]))

    def has(self, way):
        """Whether kvferry can use a way that not every machine has."""
        try:
            self.scenario(way, "status")
            return True
        except Failed as e:
            self.lost(f"kvferry over {way.transport}", e)
            return False

    def lost(self, name, why):
        """A participant that could not be measured; the rest goes on."""
        self.missing[name] = str(why)
        print(f"PEER NOT MEASURED: {name}: {why}", file=sys.stderr, flush=True)

    def python(self, package):
        if package not in self.pythons:
            try:
                self.pythons[package] = install.environment(package)
                self.packages[package] = install.versions(self.pythons[package])
            except Exception as e:
                self.pythons[package] = None
                self.lost(package, e)
        return self.pythons[package]

    def start(self, peer, *more):
        """A peer's worker, paused; None if it cannot be had."""
        if self.options.peers == "none" or id(peer) in self.failed:
            return None
        if self.options.peers == "fake":
            command = [sys.executable, WORKERS / "fake_pair.py", *self.options.fake_arguments.split()]
        else:
            python = self.python(peer.package)
            if python is None:
                return None
            command = [python, WORKERS / peer.worker, "--pool", self.pool, *peer.arguments, *more]
            cpus = sorted(os.sched_getaffinity(0))
            if peer.pinned and len(cpus) > 1:
                command += ["--cpu", cpus[0], "--target-cpu", cpus[1]]
        participant = Participant(peer.name, command, peer.environment, self.options.deadline)
        try:
            participant.setup = participant.ready()
            participant.pause()
            return participant
        except Failed as e:
            participant.end()
            self.failed.add(id(peer))  # not a second time: each costs a deadline
            self.lost(peer.name, e)
            return None

    def kvferry(self, way, *more):
        repeats = self.options.repeats
        return Participant("kvferry", [self.bench, *way.arguments(), "--json", "--scattered", "--pool-mib",
                                       self.options.pool_mib, "--quiet-s", self.options.quiet_s,
                                       "--repeats", repeats, *more], way.environment,
                           max(120, self.options.deadline))

    def scenario(self, way, name, *more):
        """One run of a scenario of kvferry-bench."""
        participant = self.kvferry(way, "--scenario", name, *more)
        try:
            return participant.line()
        finally:
            participant.end()

    # --- the six cases

    def transfers(self):
        rows = []
        for ways, peers in self.groups:
            running = {}
            try:
                for peer in peers:
                    self.settings[f"{peer.name} ({ways[0].transport})"] = peer.settings()
                    if (participant := self.start(peer)) is not None:
                        running[peer.name] = participant
                for size, blocks in self.cases:
                    rows += self.case(ways, running, size, blocks)
            finally:
                for participant in running.values():
                    participant.end()
        return rows

    def case(self, ways, running, size, blocks):
        benches = [self.kvferry(way, "--step", "--block-size", size, "--blocks", blocks) for way in ways]
        times = {name: [] for name in running}
        try:
            for name in list(running):
                self.turn(running, name, lambda p: p.ask(do="case", block_size=size, blocks=blocks))
            for repetition in range(self.options.repeats + 1):
                turns = [*benches, *running]
                self.random.shuffle(turns)
                for who in turns:
                    if not isinstance(who, str):
                        who.send("")
                        who.line()
                        continue
                    compared = repetition == 0
                    answer = self.turn(running, who, lambda p: p.ask(do="move", compared=compared))
                    if answer and not compared:
                        times[who].append(answer["seconds"])
            results = [bench.line() for bench in benches]
        finally:
            for bench in benches:
                bench.end()
        measured = {name: size * blocks / statistics.median(times[name]) / 1e9
                    for name in running if times[name]}
        rows = [row(way, result, measured) for way, result in zip(ways, results)]
        for made in rows:
            say(table_line(made))
        return rows

    def turn(self, running, name, action):
        """Lets a peer run for one request; who fails is out."""
        participant = running[name]
        participant.resume()
        try:
            answer = action(participant)
            participant.pause()
            return answer
        except Failed as e:
            self.lost(name, e)
            participant.end()
            del running[name]
            return None

    # --- fixed costs

    def latency(self):
        """One block of 4 KiB, from asking for it to its being there. Turns of a whole run each."""
        rows = []
        rounds = 100 if self.options.quick else 1000
        for ways, peers in self.groups:
            found = {way.name(): [] for way in ways}
            theirs = {}
            running = {p.name: q for p in peers if (q := self.start(p)) is not None}
            try:
                for _ in range(1 if self.options.quick else 3):
                    for way in ways:
                        found[way.name()].append(self.scenario(way, "latency", "--rounds", rounds))
                    for name in list(running):
                        answer = self.turn(running, name,
                                           lambda p: p.ask(do="latency", rounds=rounds, block_size=4096))
                        if answer:
                            theirs.setdefault(name, []).append(answer)
            finally:
                for participant in running.values():
                    participant.end()
            keys = ["p50_us", "p99_us", "wait_p50_us", "event_fd_p50_us", "limit_p50_us", "limit_p99_us"]
            for way in ways:
                rows.append({"transport": way.transport, "memory": way.memory, "waiting": way.waiting,
                             **medians(found[way.name()], keys), "limit": found[way.name()][0]["limit"],
                             "peers": {name: {"waiting": runs[0]["waiting"], **medians(runs, ["p50_us", "p99_us"])}
                                       for name, runs in theirs.items()}})
        return rows

    def preparation(self):
        """Before the first byte: knowing a peer, lists over all blocks, a request for 4096 of them."""
        way = self.groups[0][0][0]
        blocks = 512 if self.options.quick else 4096
        ours = self.scenario(way, "begin", "--blocks", blocks)
        rows = [{"who": "kvferry", "peer_ms": ours["peer_ms"], "prepare_ms": ours["layout_ms"],
                 "request_us": ours["p50_us"], "blocks": blocks}]
        for peer in SAME_HOST[:1] + TCP[1:2]:
            participant = self.start(peer)
            if participant is None or self.options.peers == "fake":
                if participant:
                    participant.end()
                continue
            running = {peer.name: participant}
            cost = self.turn(running, peer.name, lambda p: p.ask(do="case", block_size=4096, blocks=blocks))
            moves = [self.turn(running, peer.name, lambda p: p.ask(do="move", compared=False))
                     for _ in range(9) if peer.name in running]
            if cost is not None and all(moves):
                made = [move["make_us"] for move in moves if "make_us" in move]
                rows.append({"who": peer.name, **participant.setup, **cost, "blocks": blocks,
                             **({"request_us": statistics.median(made)} if made else {})})
            for participant in running.values():
                participant.end()
        return rows

    def status(self):
        ours = self.scenario(self.groups[0][0][0], "status")
        rows = [{"who": "kvferry", "call": "kvf_transfer_poll() of an ended transfer", "ns": ours["transfer_poll_ns"]},
                {"who": "kvferry", "call": "kvf_agent_take_events() with nothing there", "ns": ours["take_events_ns"]}]
        if self.options.peers == "real":
            rows += self.each(SAME_HOST[:1], lambda p: p.ask(do="status", calls=10000))
        return rows

    def registration(self):
        rows = []
        for regions in REGIONS[:1] if self.options.quick else REGIONS:
            ours = self.scenario(self.groups[0][0][0], "registration", "--regions", regions)
            rows.append({"who": "kvferry", **{key: ours[key] for key in (
                "regions", "first_us", "last_us", "last_over_first", "all_ms")}})
            if self.options.peers == "real" and regions <= 4096:  # Mooncake's cost is quadratic
                rows += self.each(SAME_HOST[:1] + TCP[1:2], lambda p: p.ask(do="registration", regions=regions))
        return rows

    def idle(self):
        seconds = 1 if self.options.quick else 10
        ours = self.scenario(self.groups[0][0][0], "idle", "--idle-s", seconds)
        rows = [{"who": "kvferry", "cpu_ms_per_s": ours["cpu_ms"] / ours["seconds"],
                 "wakeups_per_s": ours["wakeups_per_s"]}]
        if self.options.peers == "real":
            def rest(participant):
                before, begin = cpu_ms(participant.pids), time.perf_counter()
                time.sleep(seconds)
                return {"cpu_ms_per_s": (cpu_ms(participant.pids) - before) / (time.perf_counter() - begin)}
            both = dataclasses.replace(SAME_HOST[0], name="nixl, progress threads on both sides (its default)",
                                       arguments=["--progress"])
            rows += self.each([both, TCP[1]], rest)
        return rows

    def each(self, peers, action):
        """A row for each peer from one request."""
        rows = []
        for peer in peers:
            if (participant := self.start(peer)) is None:
                continue
            running = {peer.name: participant}
            answer = self.turn(running, peer.name, action)
            if answer is not None:
                rows.append({"who": peer.name, **answer})
                participant.end()
        return rows

    def run(self):
        begin, load = time.time(), os.getloadavg()[0]
        result = {"rows": self.transfers() if "transfers" in self.options.parts else []}
        for part in PARTS[1:]:
            if part in self.options.parts:
                say(part)
            result[part] = getattr(self, part)() if part in self.options.parts else []
        return {**result, "settings": self.settings, "packages": self.packages, "missing": self.missing,
                "seconds": time.time() - begin, "load_before": load, "load_after": os.getloadavg()[0],
                "pool_mib": self.options.pool_mib, "repeats": self.options.repeats, "spin_us": SPIN_US}


def row(way, result, peers):
    if not result["compared"]:
        raise Failed(f"kvferry over {way.name()}: {result['case']} was not compared")
    return {"transport": way.transport, "memory": way.memory, "waiting": way.waiting, "threads": way.threads,
            "case": result["case"], "block_size": result["block_size"], "blocks": result["blocks"],
            "kvferry_gbps": result["gbps"], "limit_gbps": result["limit_gbps"], "ratio": result["ratio"],
            "limit": result["limit"], "bare_gbps": result["bare_gbps"], "noisy": result["noisy"],
            "repeats": result["repeats"], "peers": peers}


def table_line(made):
    peers = "  ".join(f"{name} {gbps:.2f}" for name, gbps in made["peers"].items())
    way = f"{made['transport']} {made['memory']} {made['waiting']}"
    return (f"{way:20} {made['case']:14} kvferry {made['kvferry_gbps']:6.2f}  limit {made['limit_gbps']:6.2f}  "
            f"ratio {made['ratio']:.2f}  {peers}")


def medians(runs, keys):
    return {key: statistics.median(run[key] for run in runs) for key in keys}
