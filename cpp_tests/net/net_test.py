#!/usr/bin/env python3
"""net_test.py --agent PROGRAM --rank PROGRAM --stage PROGRAM --votes PROGRAM
             [--transport tcp] [--list] [SCENARIO...]

The ctest entries net.tcp.SCENARIO and net.ucx.SCENARIO.

Handoffs between "hosts" (network namespaces, see hosts.py) over networks that are slow, lossy, cut or
used by strangers. Every scenario asserts outcome, cause, memory safety, and that everything is over
within its time. Where the machine allows no namespaces, one line in capitals tells so, and the test
counts as skipped (exit status 77)."""

import argparse
import ctypes
import os
import signal
import sys
import threading
import time

sys.dont_write_bytecode = True
from hosts import Missing, Network, need  # noqa: E402

SKIPPED = 77
# Deadlines of process_test::quick() in cpp_tests/process/cache.hpp: 3 s of silence, transfers of 20 s.
SILENCE = 3.0
OPTIONS = None
KEY = "a key for tests, thirty-two bytes"


def expect(condition, *what):
    if not condition:
        raise AssertionError(" ".join(str(w) for w in what))


class Timer:
    """`with Timer(10):` fails if the block takes longer: a bound for hangs, not a measurement."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __enter__(self):
        self.begin = time.monotonic()
        return self

    def __exit__(self, kind, *_):
        self.elapsed = time.monotonic() - self.begin
        if kind is None:
            expect(self.elapsed < self.seconds, f"took {self.elapsed:.1f} s, limit {self.seconds} s")


class Rank:
    """An agent_program on a host."""

    def __init__(self, host, name, block=65536, slots=64, listen=None, advertise="", key=KEY,
                 memory="pool"):
        env = {
            "KVF_TEST_LISTEN": listen or f"{host.address}:0",
            "KVF_TEST_ADVERTISE": advertise,
            "KVFERRY_TRANSPORTS": OPTIONS.transport,
            "KVFERRY_AUTH_KEY_FILE": "",
        }
        if key is not None:
            env["KVFERRY_AUTH_KEY_FILE"] = key_file(key)
        env.update(OPTIONS.env)
        self.slots, self.block = slots, block
        self.host = host
        self.program = host.start(OPTIONS.agent, name, str(block), str(slots), "1", memory, **env)
        first = self.program.line()
        expect(first == "ready", name, first)

    def ask(self, line, seconds=30):
        return self.program.ask(line, seconds)

    def fill(self, seed):
        expect(self.ask(f"fill {seed}") == "ok")

    def peer(self, other, status="KVF_OK"):
        metadata = other if isinstance(other, str) else other.ask("meta")
        got = self.ask("peer " + metadata)
        expect(got == status, got, self.ask("peerstate 0"))

    def lost(self, seconds):
        """Status and text of the peer once it is lost."""
        status, _, text = self.ask(f"peerstate {int(seconds * 1000)}", seconds + 10).partition(" ")
        return status, text

    def refused(self, reason, at_least=1):
        """Waits until so many connections were refused for a reason."""
        end = time.monotonic() + 20
        while True:
            line = self.ask(f'metric kvferry_refused_connections_total{{reason="{reason}"')
            if line != "none" and int(line.rsplit(" ", 1)[1]) >= at_least:
                return
            expect(time.monotonic() < end, line)
            time.sleep(0.02)

    def publish(self, key, slots=None, claim=0, lease=0):
        slots = slots or range(self.slots)
        return self.ask(f"publish {key} {len(slots)} {','.join(map(str, slots))} {claim} {lease}")

    def published(self, key, seconds=20):
        return self.ask(f"published {key} {int(seconds * 1000)}", seconds + 10)

    def begin(self, ticket, slots=None, deadline=0):
        slots = slots or range(self.slots)
        return int(self.ask(f"import {ticket} {','.join(map(str, slots))} 0 {deadline}"))

    def wait(self, number, seconds=25):
        return self.ask(f"wait {number} {int(seconds * 1000)}", seconds + 10)

    def state(self, number):
        cause, safe, moved, transport, ms, *text = self.ask(f"state {number}").split(" ", 5)
        return {"cause": cause, "safe": safe, "bytes": int(moved), "transport": transport, "ms": int(ms),
                "text": text[0] if text else ""}

    def compare(self, seed, slots=None, source=None):
        slots = list(slots or range(self.slots))
        for to, of in zip(slots, source or slots):
            difference = self.ask(f"differs {to} {seed} {of}")
            expect(difference == "same", difference)


def key_file(key):
    path = f"/tmp/kvferry_net_{os.getpid()}_{abs(hash(key))}"
    if not os.path.exists(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(descriptor, key.encode())
        os.close(descriptor)
        KEY_FILES.append(path)
    return path


KEY_FILES = []


def pair(net, a=1, b=2, **shape):
    """Source on one host, destination on another, connected."""
    source, sink = Rank(net[a], "source", **shape), Rank(net[b], "sink", **shape)
    source.fill(7)
    sink.peer(source)
    return source, sink


def moves(source, sink, key, seed=7, seconds=25):
    """A whole handoff, every byte compared."""
    ticket = source.publish(key)
    number = sink.begin(ticket)
    got = sink.wait(number, seconds)
    expect(got == "KVF_OK safe", got, sink.state(number)["text"])
    state = sink.state(number)
    expect(state["transport"] == OPTIONS.transport, state)
    expect(state["bytes"] == 2 * sink.slots * sink.block, state)
    sink.compare(seed)
    expect(source.published(key) == "KVF_OK")
    return state


def until_moving(sink, number, seconds=15):
    """Waits until bytes have come, and the transfer still runs."""
    end = time.monotonic() + seconds
    while True:
        state = sink.state(number)
        expect(state["cause"] == "KVF_IN_PROGRESS", "it ended too early:", state)
        if state["bytes"] > 0:
            return
        expect(time.monotonic() < end, "no byte came")
        time.sleep(0.01)


def failed(sink, number, causes, words, seconds):
    """The transfer fails with one of the causes, a text with one of the words, and is safe."""
    got = sink.wait(number, seconds)
    state = sink.state(number)
    expect(got.split()[0] in causes, got, state)
    expect(got.split()[1] == "safe", got, state)
    expect(any(word in state["text"] for word in words), state)
    expect("source" in state["text"], "the text names no peer:", state)
    return state


# ---- scenarios -------------------------------------------------------------------------------------


def reshard():
    """Two tensor-parallel ranks to two pipeline stages, each on a host of its own; pull and push."""
    for shape in ("GridTp2Pp1ToTp1Pp2", "PushPp2ToTp2", "MlaTp2ToPp2"):
        with Network(4) as net:
            env = {"KVFERRY_TRANSPORTS": OPTIONS.transport, "KVFERRY_AUTH_KEY_FILE": key_file(KEY)}
            names = ("0:0", "0:1", "1:0", "1:1")
            programs = [
                net[n + 1].start(OPTIONS.rank, shape, name, KVF_TEST_LISTEN=f"{net[n + 1].address}:0", **env)
                for n, name in enumerate(names)
            ]
            for program in programs:
                expect(program.line() == "ready")

            def ask(line):
                for program in programs:
                    program.send(line)
                answers = [program.line() for program in programs]
                expect(not any(a.startswith("error") for a in answers), line[:20], answers)
                return [a for a in answers if a]

            engines = [ask(f"engine {s} " + ",".join(ask(f"meta {s}")))[0] for s in (0, 1)]
            ask("peer 1 " + engines[0])
            if shape.startswith("Push"):
                ask("peer 0 " + engines[1])
            requests = 6 if shape.startswith("Push") else 4
            for turn in range(2):
                ask(f"round {turn}")
                for q in range(requests):
                    if shape.startswith("Push"):
                        ask(f"push {q} " + ",".join(ask(f"receive {q}")))
                    else:
                        tickets = ",".join(ask(f"publish {q}")).split(",")
                        ask(f"import {q} {tickets[q % len(tickets)]}")
                counted = sum(int(a) for a in ask("finish"))
                checked = ask("check")
                expect(not any(a.startswith("differs") for a in checked), shape, checked)
                expect(counted == sum(int(a) for a in checked) > 0, shape, counted, checked)
                ask("release")


def ipv6():
    """IPv6 addresses, and a wildcard with the address that peers are told."""
    with Network(2) as net:
        source = Rank(net[1], "source", listen="[fd77::1]:0")
        sink = Rank(net[2], "sink", listen="[fd77::2]:0")
        source.fill(7)
        sink.peer(source)
        moves(source, sink, 1)
        expect(any(remote == "fd77::1" for _, remote, _ in net[2].connections()), net[2].connections())


def rate():
    """100 Mbit/s: 32 MiB arrive, and take their time."""
    with Network(2) as net:
        net.rate(net[2], "100mbit")
        source, sink = pair(net, slots=128, block=1 << 17)
        state = moves(source, sink, 1)
        expect(state["ms"] > 1500, "the rate was not limited:", state)


def loss():
    """Every 50th packet is lost in each direction: all bytes arrive."""
    with Network(2) as net:
        source, sink = pair(net, slots=64, block=1 << 16)
        for host in (net[1], net[2]):
            host.iptables("-A", "INPUT", "-p", "tcp", "-m", "statistic", "--mode", "random",
                          "--probability", "0.02", "-j", "DROP")
        moves(source, sink, 1)
        moves(source, sink, 2)
        lost = sum(int(host.iptables("-L", "INPUT", "-v", "-n", "-x").splitlines()[2].split()[0])
                   for host in (net[1], net[2]))
        expect(lost > 0, "no packet was lost")


def delay():
    """50 ms each way: a handoff takes a few round trips, not one for each batch."""
    with Network(2) as net:
        addresses = net.delay(net[1], net[2], 0.05)
        OPTIONS.env = {"UCX_NET_DEVICES": "slow0"}  # UCX looks for its own way
        source = Rank(net[1], "source", listen=addresses[0] + ":0")
        sink = Rank(net[2], "sink", listen=addresses[1] + ":0")
        source.fill(7)
        sink.peer(source)
        state = moves(source, sink, 1)
        expect(state["ms"] >= 100, "it was not delayed:", state)
        moves(source, sink, 2)


def slow_pair(net):
    """A transfer that runs long enough to be disturbed: 64 MiB at 200 Mbit/s."""
    net.rate(net[2], "200mbit")
    source, sink = pair(net, slots=64, block=1 << 19)
    ticket = source.publish(1)
    number = sink.begin(ticket)
    until_moving(sink, number)
    return source, sink, number


def heals(source, sink, key=9):
    """After the disturbance: a new peer handle, a new publication, right bytes."""
    sink.peer(source)
    source.fill(11)
    ticket = source.publish(key, [3, 5])
    number = sink.begin(ticket, [4, 6])
    got = sink.wait(number)
    expect(got == "KVF_OK safe", got, sink.state(number))
    sink.compare(11, [4, 6], [3, 5])
    expect(source.published(key) == "KVF_OK")


def one_way():
    """What the source sends is dropped, what it hears is not: both sides end."""
    with Network(2) as net:
        source, sink, number = slow_pair(net)
        net[1].iptables("-A", "OUTPUT", "-d", net[2].address, "-j", "DROP")
        with Timer(SILENCE + 15):
            failed(sink, number, ["KVF_ERR_PEER_LOST"], ["silent"], 15)
            status, text = sink.lost(1)
            expect(status == "KVF_ERR_PEER_LOST" and "silent" in text, status, text)
            expect(source.published(1) in ("KVF_ERR_PEER_LOST", "KVF_ERR_EXPIRED"), source.published(1))
        net[1].iptables("-F", "OUTPUT")
        heals(source, sink)


def partition():
    """No route in either direction: both sides end by themselves, and meet again after it."""
    with Network(2) as net:
        source, sink, number = slow_pair(net)
        for host, other in ((net[1], net[2]), (net[2], net[1])):
            host.run("ip", "route", "add", "blackhole", other.address + "/32")
        with Timer(SILENCE + 15):
            failed(sink, number, ["KVF_ERR_PEER_LOST"], ["silent", "cannot be reached"], 15)
            published = source.published(1)
            expect(published in ("KVF_ERR_PEER_LOST", "KVF_ERR_EXPIRED"), published)
        # A peer behind a partition is an error after its time, not a hang.
        with Timer(20):
            sink.peer(source, "KVF_ERR_PEER_UNREACHABLE")
        for host, other in ((net[1], net[2]), (net[2], net[1])):
            host.run("ip", "route", "del", "blackhole", other.address + "/32")
        heals(source, sink)


def short_partition():
    """A partition shorter than the silence: nothing is lost."""
    with Network(2) as net:
        source, sink, number = slow_pair(net)
        net[1].iptables("-A", "OUTPUT", "-d", net[2].address, "-j", "DROP")
        time.sleep(1)
        net[1].iptables("-F", "OUTPUT")
        got = sink.wait(number)
        expect(got == "KVF_OK safe", got, sink.state(number))
        sink.compare(7)
        expect(source.published(1) == "KVF_OK")


def data_connections(source_host, sink_host):
    """Connections from the sink to the source's port that carry data: the busy ones."""
    rows = source_host.run("ss", "-tnH", "state", "established").splitlines()
    busy = []
    for line in rows:
        _, sent, local, remote = line.split()[:4]
        if remote.startswith(sink_host.address + ":") and int(sent) > 65536:
            busy.append((int(local.rsplit(":", 1)[1]), int(remote.rsplit(":", 1)[1])))
    return busy


def reset():
    """The data connections are reset in mid-copy, the agents live: this transfer fails, the next not."""
    with Network(2) as net:
        source, sink, number = slow_pair(net)
        busy = data_connections(net[1], net[2])
        expect(busy, "no data connection is busy")
        for port, sink_port in busy:
            net[1].iptables("-A", "INPUT", "-p", "tcp", "--dport", str(port), "--sport", str(sink_port),
                            "-j", "REJECT", "--reject-with", "tcp-reset")
        with Timer(20):
            failed(sink, number, ["KVF_ERR_TRANSFER"], ["reset", "Broken pipe"], 15)
            published = source.published(1)
            expect(published == "KVF_ERR_TRANSFER", published)
        status, text = sink.lost(0)
        expect(status == "KVF_OK", status, text)
        moves(source, sink, 2)


def half_open():
    """The source's end of the data connections is gone and the reader is not told: it finds out."""
    with Network(2) as net:
        source, sink, number = slow_pair(net)
        busy = data_connections(net[1], net[2])
        expect(busy, "no data connection is busy")
        # Each packet of data that comes is answered with a reset and never seen by the reader.
        for port, sink_port in busy:
            net[2].iptables("-A", "INPUT", "-p", "tcp", "--sport", str(port), "--dport", str(sink_port),
                            "-j", "REJECT", "--reject-with", "tcp-reset")
        time.sleep(0.5)
        net[2].iptables("-F", "INPUT")
        with Timer(15):
            failed(sink, number, ["KVF_ERR_TRANSFER"], ["reset", "timed out", "Broken pipe"], 12)
            published = source.published(1)
            expect(published == "KVF_ERR_TRANSFER", published)
        moves(source, sink, 2)


def reader_gone():
    """The reader's host vanishes without a word: the source frees what it held for it."""
    with Network(2) as net:
        net.rate(net[2], "200mbit")
        source = Rank(net[1], "source", slots=64, block=1 << 19)
        source.fill(7)
        metadata = source.ask("meta")
        before = source.program.sockets()
        sink = Rank(net[2], "sink", slots=64, block=1 << 19)
        sink.peer(metadata)
        number = sink.begin(source.publish(1))
        until_moving(sink, number)
        net[2].run("ip", "link", "set", "eth0", "down")
        sink.program.kill()
        with Timer(SILENCE + 15):
            published = source.published(1, 15)
            expect(published in ("KVF_ERR_PEER_LOST", "KVF_ERR_EXPIRED"), published)
        # UCX keeps sockets of its own.
        end = time.monotonic() + 15
        while OPTIONS.transport == "tcp" and source.program.sockets() > before:
            expect(time.monotonic() < end, source.program.sockets(), "sockets, before", before)
            time.sleep(0.05)


def stopped():
    """The source is stopped for longer than the silence, then goes on."""
    with Network(2) as net:
        source, sink, number = slow_pair(net)
        source.program.signal(signal.SIGSTOP)
        with Timer(SILENCE + 15):
            failed(sink, number, ["KVF_ERR_PEER_LOST"], ["silent"], 15)
        source.program.signal(signal.SIGCONT)
        published = source.published(1)
        expect(published in ("KVF_ERR_PEER_LOST", "KVF_ERR_EXPIRED"), published)
        heals(source, sink)


def shortly_stopped():
    """The source is stopped for less than the silence: nothing is lost."""
    with Network(2) as net:
        source, sink, number = slow_pair(net)
        source.program.signal(signal.SIGSTOP)
        time.sleep(1)
        source.program.signal(signal.SIGCONT)
        got = sink.wait(number)
        expect(got == "KVF_OK safe", got, sink.state(number))
        sink.compare(7)
        expect(source.published(1) == "KVF_OK")


def killed():
    """The source dies in mid-copy: no pidfd tells on another host, the closed connection does."""
    with Network(2) as net:
        source, sink, number = slow_pair(net)
        source.program.kill()
        with Timer(SILENCE + 10):
            failed(sink, number, ["KVF_ERR_PEER_LOST", "KVF_ERR_TRANSFER"], ["refused", "closed", "reset",
                   "end", "cannot be reached", "Endpoint timeout"], 10)
            status, text = sink.lost(5)
            expect(status == "KVF_ERR_PEER_LOST" and "source" in text, status, text)


def stranger():
    """Another program has the source's port now: noticed whether it speaks, is silent, or hangs up."""
    with Network(2) as net:
        listen = f"{net[1].address}:7100"
        for answer, causes, words in (
            ("HTTP/1.1 400 Bad Request\\r\\n\\r\\n", ["KVF_ERR_PEER_LOST"], ["somebody else answers"]),
            ("", ["KVF_ERR_PEER_UNREACHABLE"], ["no answer", "did not answer", "cannot be reached"]),
            ("close", ["KVF_ERR_PEER_UNREACHABLE"], ["cannot be reached"]),
        ):
            source = Rank(net[1], "source", listen=listen)
            metadata = source.ask("meta")
            source.program.kill()
            script = (
                "import socket\n"
                f"s = socket.create_server(('{net[1].address}', 7100))\n"
                "print('ready', flush=True)\nkept = []\n"
                "while True:\n"
                "    c, _ = s.accept()\n"
                f"    if '{answer}' == 'close': c.close(); continue\n"
                f"    c.sendall(b'{answer}'); kept.append(c)\n"
            )
            other = net[1].start(sys.executable, "-c", script)
            expect(other.line() == "ready")
            sink = Rank(net[2], "sink")
            with Timer(25):
                status = sink.ask("peer " + metadata)
                while status == "KVF_TIMED_OUT" or status == "KVF_IN_PROGRESS":
                    status = sink.lost(10)[0]
            status, text = sink.lost(0)
            expect(status in causes, answer, status, text)
            expect(any(word in text for word in words) and "source" in text, answer, text)
            other.kill()
            sink.program.kill()


def refused():
    """A firewall refuses connections to a source that was never met: no death notice, until the silence is
    over; and when it opens, the way is found."""
    with Network(2) as net:
        source, sink = Rank(net[1], "source"), Rank(net[2], "sink")
        source.fill(7)
        rule = ["INPUT", "-p", "tcp", "-s", net[2].address, "-j", "REJECT", "--reject-with", "tcp-reset"]
        net[1].iptables("-A", *rule)
        with Timer(SILENCE + 5) as timer:
            sink.peer(source, "KVF_ERR_PEER_UNREACHABLE")
        # It was refused at once, and tried for so long all the same.
        expect(timer.elapsed > SILENCE - 0.5, timer.elapsed)
        status, text = sink.lost(0)
        expect(status == "KVF_ERR_PEER_UNREACHABLE" and "refused" in text and "it failed" in text, status, text)
        opens = threading.Timer(1.0, net[1].iptables, ["-D", *rule])
        opens.start()
        sink.peer(source)
        opens.join()
        moves(source, sink, 1)


def restart():
    """The source restarts at its address: another agent, whatever the reader still has of the old one."""
    with Network(2) as net:
        listen = f"{net[1].address}:7100"
        source = Rank(net[1], "source", listen=listen)
        sink = Rank(net[2], "sink")
        source.fill(7)
        old = source.ask("meta")
        sink.peer(old)
        ticket = source.publish(1)
        # It happens behind a short partition, so that no closed connection tells.
        net[1].iptables("-A", "OUTPUT", "-d", net[2].address, "-j", "DROP")
        source.program.kill()
        again = Rank(net[1], "source", listen=listen)
        again.fill(9)
        net[1].iptables("-F", "OUTPUT")
        number = sink.begin(ticket)
        with Timer(15):
            # Whichever connection is used first finds that nobody knows it there.
            failed(sink, number, ["KVF_ERR_PEER_LOST", "KVF_ERR_TRANSFER"],
                   ["replaced", "silent", "reset", "Endpoint timeout", "endpoint was closed"], 12)
        status, text = sink.lost(5)
        expect(status == "KVF_ERR_PEER_LOST", status, text)
        # Asked with what is known of the old one.
        sink.peer(old, "KVF_ERR_PEER_LOST")
        status, text = sink.lost(0)
        expect("replaced" in text, text)
        moves_after = again.publish(1, [3])
        sink.peer(again)
        number = sink.begin(moves_after, [4])
        expect(sink.wait(number) == "KVF_OK safe", sink.state(number))
        sink.compare(9, [4], [3])


def keys():
    """With another key, and without one: refused on both sides, counted, and the right one works."""
    with Network(3) as net:
        source = Rank(net[1], "source")
        source.fill(7)
        sink = Rank(net[2], "stranger", key="another key of the same length...")
        sink.peer(source, "KVF_ERR_AUTH")
        status, text = sink.lost(0)
        expect(status == "KVF_ERR_AUTH" and "another pre-shared key" in text, status, text)
        source.refused("wrong_key")
        # An agent without a key listens on loopback only, or says that it is open.
        sink = Rank(net[2], "keyless", key=None, listen="127.0.0.1:0")
        sink.peer(source, "KVF_ERR_AUTH")
        status, text = sink.lost(0)
        expect(status == "KVF_ERR_AUTH" and "without a pre-shared key" in text, status, text)
        source.refused("no_key")
        sink = Rank(net[3], "sink")
        sink.peer(source)
        moves(source, sink, 1)


def flood():
    """A stranger opens connections and says nothing, without end: a peer far away comes through."""
    with Network(3) as net:
        addresses = net.delay(net[1], net[2], 0.05)
        source = Rank(net[1], "source", listen="0.0.0.0:7100", advertise=addresses[0] + ":0")
        source.fill(7)
        script = (
            "import collections, socket\n"
            "kept = collections.deque(maxlen=400)\n"
            "n = 0\n"
            "while True:\n"
            f"    kept.append(socket.create_connection(('{net[1].address}', 7100)))\n"
            "    n += 1\n"
            "    if n == 600: print('ready', flush=True)\n"
        )
        flooder = net[3].start(sys.executable, "-c", script)
        expect(flooder.line() == "ready")
        source.refused("too_many", 600 - 256)
        # 256 strangers, and those that were ended a moment ago; there were 600 and more.
        sockets = source.program.sockets()
        expect(sockets < 520, "descriptors:", sockets)
        sink = Rank(net[2], "sink", listen=addresses[1] + ":0")
        sink.peer(source)
        moves(source, sink, 1)
        expect(flooder.process.poll() is None, "the flood has ended")


class Stage:
    """A rank_program: a pipeline stage of an engine, on a host."""

    # head bytes, slots, state slots, stages, stage, state, block major, memory
    def __init__(self, host, name, stages, stage):
        words = ["32768", "32", "1", str(stages), str(stage), "0", "0", "pool"]
        self.program = host.start(
            OPTIONS.stage, name, "usual", *words, KVF_TEST_LISTEN=f"{host.address}:0",
            KVFERRY_TRANSPORTS=OPTIONS.transport, KVFERRY_AUTH_KEY_FILE=key_file(KEY))
        first = self.program.line()
        expect(first == "ready", name, first)

    def ask(self, line, wanted=None, seconds=30):
        answer = self.program.ask(line, seconds)
        expect(not answer.startswith("error"), line[:30], answer)
        expect(wanted is None or answer == wanted, line[:30], answer)
        return answer


def four(net):
    """Two stages of a source on hosts 1 and 2; two engines that read both on hosts 3 and 4."""
    sources = [Stage(net[n + 1], f"source{n}", 2, n) for n in (0, 1)]
    metas = " ".join(s.ask("agentmeta") for s in sources)
    for n, source in enumerate(sources):
        source.ask(f"engine {n} {metas}", "ok")
        source.ask("fill 7", "ok")
    engine = sources[0].ask("meta")
    sinks = [Stage(net[n + 3], f"sink{n}", 1, 0) for n in (0, 1)]
    for sink in sinks:
        sink.ask("peer source " + engine, "KVF_OK")
    return engine, sources, sinks


ALL = ",".join(str(n) for n in range(32))


def begin_four(sources, sink, key):
    tickets = [s.ask(f"publish {key} 128 {ALL} -1 0 0") for s in sources]
    return sink.ask(f"import source {tickets[0]} {ALL} 0 -1 0")


def moves_four(sources, sink, key):
    number = begin_four(sources, sink, key)
    sink.ask(f"wait {number} 20000", "KVF_OK safe")
    sink.ask(f"compare 7 {ALL} {ALL}", "same")
    for source in sources:
        source.ask(f"published {key} 20000", "KVF_OK")


def one_of_four():
    """One of two sources is cut off in mid-copy: one outcome, that names it; who needs it not goes on."""
    with Network(4) as net:
        engine, sources, sinks = four(net)
        moves_four(sources, sinks[1], 1)
        net.rate(net[3], "200mbit")
        number = begin_four(sources, sinks[0], 2)
        time.sleep(0.5)
        net[2].iptables("-A", "INPUT", "-j", "DROP")
        net[2].iptables("-A", "OUTPUT", "-j", "DROP")
        with Timer(SILENCE + 20):
            sinks[0].ask(f"wait {number} 20000", "KVF_ERR_PEER_LOST safe")
            text = sinks[0].ask(f"text {number}")
            expect("source1" in text and "silent" in text, text)
            # The source that was not cut hears of it, and is free at once.
            sources[0].ask("published 2 20000", "KVF_ERR_PEER_LOST")
            ended = sources[1].ask("published 2 20000")
            expect(ended in ("KVF_ERR_PEER_LOST", "KVF_ERR_EXPIRED"), ended)
        for chain in ("INPUT", "OUTPUT"):
            net[2].iptables("-F", chain)
        for key, sink in enumerate(sinks):
            sink.ask("peer source " + engine, "KVF_OK")
            moves_four(sources, sink, 3 + key)


def push():
    """A push between hosts (the receiver fetches), then one that is cut in mid-copy: both sides end."""
    with Network(2) as net:
        source, sink = Stage(net[1], "source", 1, 0), Stage(net[2], "sink", 1, 0)
        source.ask("fill 7", "ok")
        sink.ask("peer source " + source.ask("meta"), "KVF_OK")
        source.ask("peer sink " + sink.ask("meta"), "KVF_OK")

        def begin(key):
            receive, offer = sink.ask(f"receive {key} {ALL} 0 128 -1 0").split()
            return receive, source.ask(f"push sink {offer} 128 {ALL} -1 0")

        receive, sent = begin(1)
        sink.ask(f"wait {receive} 20000", "KVF_OK safe")
        source.ask(f"wait {sent} 20000", "KVF_OK safe")
        sink.ask(f"compare 7 {ALL} {ALL}", "same")
        net.rate(net[2], "100mbit")
        receive, sent = begin(2)
        time.sleep(0.5)
        net[1].iptables("-A", "OUTPUT", "-d", net[2].address, "-j", "DROP")
        with Timer(SILENCE + 20):
            sink.ask(f"wait {receive} 20000", "KVF_ERR_PEER_LOST safe")
            text = sink.ask(f"text {receive}")
            expect("source" in text and "silent" in text, text)
            ended = source.ask(f"wait {sent} 20000")
            expect(ended in ("KVF_ERR_PEER_LOST safe", "KVF_ERR_EXPIRED safe"), ended)


def others():
    """A source that is stopped in mid-copy, and more transfers from it than there are copying threads,
    hinder no transfer from another source."""
    with Network(3) as net:
        net.rate(net[3], "200mbit")
        slow, other = Stage(net[1], "slow", 1, 0), Stage(net[2], "other", 1, 0)
        sink = Stage(net[3], "sink", 1, 0)
        for name, source in (("slow", slow), ("other", other)):
            source.ask("fill 7", "ok")
            sink.ask(f"peer {name} {source.ask('meta')}", "KVF_OK")
        first, second = ",".join(map(str, range(8))), ",".join(map(str, range(8, 16)))
        stalled = []
        for key, slots in ((1, first), (2, second)):
            ticket = slow.ask(f"publish {key} 32 {slots} -1 0 0")
            stalled.append(sink.ask(f"import slow {ticket} {slots} 0 -1 0"))
        time.sleep(0.1)
        slow.program.signal(signal.SIGSTOP)
        for key in (3, 4):
            ticket = other.ask(f"publish {key} 4 20 -1 0 0")
            number = sink.ask(f"import other {ticket} 20 0 -1 0")
            sink.ask(f"wait {number} 2000", "KVF_OK safe")
            sink.ask("compare 7 20 20", "same")
        for number in stalled:
            sink.ask(f"wait {number} 0", "KVF_TIMED_OUT unsafe")
        for number in stalled:
            sink.ask(f"wait {number} 15000", "KVF_ERR_PEER_LOST safe")
        slow.program.signal(signal.SIGCONT)


def votes():
    """Two engines of 8 ranks on 4 hosts that lose packets: all ranks act on the same decisions. Then a
    host is cut off: its ranks are lost to the others, which go on agreeing."""
    with Network(4) as net:
        env = {"KVFERRY_TRANSPORTS": OPTIONS.transport, "KVFERRY_AUTH_KEY_FILE": key_file(KEY)}

        def engine(side, place):
            ranks = []
            for rank in range(8):
                host = net[place(rank)]
                ranks.append(host.start(OPTIONS.votes, str(rank), side, "2500", "1",
                                        KVF_TEST_LISTEN=f"{host.address}:0", **env))
            for rank in ranks:
                expect(rank.line() == "ready")
            metas = " ".join(rank.ask("agentmeta") for rank in ranks)
            for rank in reversed(ranks):
                expect(rank.ask("engine " + metas) == "ok")
            return ranks

        context = engine("context", lambda rank: (rank // 2 + 1) % 4 + 1)
        generation = engine("generation", lambda rank: rank // 2 + 1)
        source = context[0].ask("meta")
        for rank in generation:
            rank.send("peer " + source)
        for rank in generation:
            answer = rank.line()
            expect(answer == "KVF_OK", answer)
        for rank in context + generation:
            answer = rank.ask("transceiver 20000")
            expect(answer == "ok", answer)
        for n in range(1, 5):
            net[n].iptables("-A", "INPUT", "-p", "tcp", "-m", "statistic", "--mode", "random",
                            "--probability", "0.02", "-j", "DROP")

        def begin(key, ranks):
            tickets = [rank.ask(f"begin {key} {key % 32} -") for rank in context]
            expect(not any("KVF_ERR" in t or "error" in t for t in tickets), tickets)
            for rank in ranks:
                answer = rank.ask(f"begin {key} {key % 32} {tickets[0]}")
                expect(answer == "ok", answer)

        def decide(ranks):
            """One iteration: the leader decides, everybody else applies its bytes."""
            expect(generation[0].ask("readable 20000") == "yes", "no decision in time")
            decision, results = generation[0].ask("status 0 0").split()
            for rank in ranks[1:]:
                if decision != "-":
                    applied = rank.ask("apply " + decision)
                    expect(applied == results, applied, results)
            return [] if results == "none" else results.split(",")

        def until(key, kind, ranks):
            while True:
                for result in decide(ranks):
                    if result.startswith(f"{key}:{kind}:"):
                        return result

        for key in range(1, 6):
            begin(key, generation)
            with Timer(30):
                result = until(key, "ended", generation)
            expect(result == f"{key}:ended:1:KVF_OK:1:-", result)
        # Ranks 6 and 7 never take the next one; their host is cut.
        begin(6, generation[:6])
        for rank in generation[:6]:
            end = time.monotonic() + 20
            while rank.ask("record 6") != "KVF_OK":
                expect(time.monotonic() < end, "its copy did not end")
                time.sleep(0.01)
        for chain in ("INPUT", "OUTPUT"):
            net[4].iptables("-I", chain, "-j", "DROP")
        with Timer(20):
            result = until(6, "ended", generation[:6])
            _, _, outcome, cause, safe, rank = result.split(":")
            expect((outcome, cause) == ("2", "KVF_ERR_PEER_LOST") and rank in "67", result)
            # The second of the two may be noticed a little later than the first.
            if safe == "0":
                result = until(6, "safe", generation[:6])
                expect(result.split(":")[4] == "1", result)


SCENARIOS = (reshard, one_of_four, others, push, votes, ipv6, rate, loss, delay, one_way, partition, short_partition, reset, half_open,
             reader_gone, stopped, shortly_stopped, killed, stranger, refused, restart, keys, flood)


def need_ucx():
    try:
        ctypes.CDLL("libucp.so.0")
    except OSError as e:
        raise Missing("NO UCX: INSTALL libucx0") from e


def skip(reason):
    # The same line from every scenario: it is listed once.
    text = f"net.{OPTIONS.transport}: {reason}"
    print(text)
    path = os.environ.get("KVFERRY_SKIP_FILE")
    if path:
        with open(path, "a") as file:
            file.write(text + "\n")
    return SKIPPED


def main():
    global OPTIONS
    parser = argparse.ArgumentParser()
    parser.add_argument("--agent", help="agent_program")
    parser.add_argument("--rank", help="reshard_rank")
    parser.add_argument("--stage", help="rank_program of cpp_tests/handoff")
    parser.add_argument("--votes", help="consensus_rank")
    parser.add_argument("--transport", default="tcp")
    parser.add_argument("--seconds", type=int, default=150, help="longest time of one scenario")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("scenarios", nargs="*")
    OPTIONS = parser.parse_args()
    OPTIONS.env = {}
    known = {s.__name__: s for s in SCENARIOS
             if OPTIONS.transport == "tcp" or s not in (reset, half_open)}
    if OPTIONS.list:
        print(*known, sep="\n")
        return 0
    status = 0
    for name in OPTIONS.scenarios or known:
        def late(*_):
            raise TimeoutError(f"{name} took more than {OPTIONS.seconds} s")

        # Ended from outside: the namespaces go all the same.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        signal.signal(signal.SIGALRM, late)
        signal.alarm(OPTIONS.seconds)
        begin = time.monotonic()
        try:
            need("iptables", "tc", "ss")
            if OPTIONS.transport == "ucx":
                need_ucx()
            known[name]()
            print(f"{name}: passed in {time.monotonic() - begin:.1f} s")
        except Missing as e:
            status = status or skip(e)
        except (AssertionError, TimeoutError) as e:
            print(f"{name}: FAILED after {time.monotonic() - begin:.1f} s: {type(e).__name__}: {e}")
            status = 1
        finally:
            signal.alarm(0)
            while KEY_FILES:
                os.unlink(KEY_FILES.pop())
    return status


if __name__ == "__main__":
    sys.exit(main())
