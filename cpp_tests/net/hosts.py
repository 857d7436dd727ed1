"""Hosts of a test: network namespaces on one switch, made and taken down by the test.

Everything lies in namespaces whose names carry the test's pid; nothing of the machine's own network is
touched. What an earlier, killed test has left is removed first."""

import ctypes
import fcntl
import os
import re
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time

PREFIX = "kvf"
os.environ["PATH"] += ":/usr/sbin:/sbin"


class Missing(Exception):
    """This machine does not allow what the test needs."""


def run(*command, check=True):
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def namespaces():
    return [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line.strip()]


def remove(namespace):
    """Ends what still runs there, then the namespace with its interfaces."""
    for pid in run("ip", "netns", "pids", namespace, check=False).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass
    run("ip", "netns", "del", namespace, check=False)


def remove_left_behind():
    for name in namespaces():
        found = re.fullmatch(PREFIX + r"(\d+)-\w+", name)
        if found and not os.path.exists(f"/proc/{found[1]}"):
            remove(name)


def need(*tools):
    """Raises Missing unless namespaces can be made and the tools are there."""
    if os.geteuid() != 0:
        raise Missing("NETWORK NAMESPACES NEED ROOT")
    for tool in ("ip", *tools):
        if shutil.which(tool) is None:
            raise Missing(f"NO {tool.upper()}: RUN scripts/install-tools")
    name = f"{PREFIX}{os.getpid()}-try"
    try:
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "add", "b0", "type", "bridge")
        if "iptables" in tools:
            run("ip", "netns", "exec", name, "iptables", "-w", "-A", "INPUT", "-m", "statistic", "--mode",
                "random", "--probability", "0.5", "-j", "DROP")
        if "tc" in tools:
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate",
                "1mbit", "burst", "32k", "latency", "100ms")
    except (RuntimeError, OSError) as e:
        raise Missing(f"THE KERNEL ALLOWS NO SUCH NETWORK NAMESPACE: {e}") from e
    finally:
        if name in namespaces():
            remove(name)


class Program:
    """A program on a host, asked line by line."""

    def __init__(self, host, command, env):
        self.host = host
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", host.name, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **env},
            bufsize=0,
        )
        self.pending = b""

    @property
    def pid(self):
        return self.process.pid  # `ip netns exec` becomes the program

    def send(self, line):
        self.process.stdin.write(line.encode() + b"\n")

    def line(self, seconds=30):
        """The next line; "" at the end of its output."""
        until = time.monotonic() + seconds
        while b"\n" not in self.pending:
            with selectors.DefaultSelector() as selector:
                selector.register(self.process.stdout, selectors.EVENT_READ)
                if not selector.select(max(0, until - time.monotonic())):
                    raise TimeoutError(f"{self.host.name}: no answer within {seconds} s")
            some = os.read(self.process.stdout.fileno(), 1 << 16)
            if not some:
                return ""
            self.pending += some
        line, self.pending = self.pending.split(b"\n", 1)
        return line.decode()

    def ask(self, line, seconds=30):
        self.send(line)
        return self.line(seconds)

    def signal(self, number):
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            while self._state() != "T":
                time.sleep(0.001)

    def _state(self):
        with open(f"/proc/{self.pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0]

    def kill(self):
        """As SIGKILL, and waits for its end."""
        self.process.kill()
        self.process.wait(timeout=10)

    def sockets(self):
        """Open descriptors that are sockets."""
        def is_socket(number):
            try:
                return os.readlink(f"/proc/{self.pid}/fd/{number}").startswith("socket:")
            except FileNotFoundError:
                return False  # closed since it was listed

        return sum(map(is_socket, os.listdir(f"/proc/{self.pid}/fd")))

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(timeout=10)
        self.process.stdin.close()
        self.process.stdout.close()


class Host:
    def __init__(self, network, number):
        self.network, self.number = network, number
        self.name = network.namespace(f"h{number}")
        self.address = f"10.77.0.{number}"
        self.programs = []

    def run(self, *command, check=True):
        return run("ip", "netns", "exec", self.name, *command, check=check)

    def start(self, *command, **env):
        program = Program(self, command, env)
        self.programs.append(program)
        return program

    def iptables(self, *rule):
        return self.run("iptables", "-w", *rule)

    def connections(self, *filters):
        """Established TCP connections: (local port, remote address, remote port)."""
        rows = []
        for line in self.run("ss", "-tnH", "state", "established", *filters).splitlines():
            local, remote = line.split()[2:4]
            address, port = remote.rsplit(":", 1)
            rows.append((int(local.rsplit(":", 1)[1]), address.strip("[]"), int(port)))
        return rows


class Network:
    """`with Network(4) as net:` hosts net[1] .. net[4], 10.77.0.1 .. 10.77.0.4, on one switch."""

    def __init__(self, hosts):
        remove_left_behind()
        self._names = []
        self._relays = []
        try:
            self.switch = self.namespace("sw")
            self.in_switch("link", "add", "br0", "type", "bridge")
            self.in_switch("link", "set", "br0", "up")
            self._hosts = [Host(self, n + 1) for n in range(hosts)]
            for host in self._hosts:
                self._plug(host)
        except BaseException:
            self.close()
            raise

    def namespace(self, what):
        name = f"{PREFIX}{os.getpid()}-{what}"
        run("ip", "netns", "add", name)
        self._names.append(name)
        return name

    def in_switch(self, *command):
        run("ip", "-n", self.switch, *command)

    def _plug(self, host):
        port = f"p{host.number}"
        self.in_switch("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
        self.in_switch("link", "set", port, "master", "br0", "up")
        run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
        run("ip", "-n", host.name, "addr", "add", f"fd77::{host.number}/64", "dev", "eth0", "nodad")
        run("ip", "-n", host.name, "link", "set", "eth0", "up")
        run("ip", "-n", host.name, "link", "set", "lo", "up")

    def __getitem__(self, number):
        return self._hosts[number - 1]

    def rate(self, host, rate):
        """Limits what leaves the switch to this host."""
        run("ip", "netns", "exec", self.switch, "tc", "qdisc", "replace", "dev", f"p{host.number}", "root",
            "tbf", "rate", rate, "burst", "64k", "latency", "200ms")

    def delay(self, a, b, seconds):
        """A way of its own between two hosts, 10.78.0.N, that takes this long in each direction."""
        relay = Relay(a, b, seconds)
        self._relays.append(relay)
        return f"10.78.0.{a.number}", f"10.78.0.{b.number}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        for host in getattr(self, "_hosts", []):
            for program in host.programs:
                program.close()
        for relay in self._relays:
            relay.close()
        for name in reversed(self._names):
            remove(name)
        left = [n for n in namespaces() if n.startswith(f"{PREFIX}{os.getpid()}-")]
        if left:
            print("left behind:", left, file=sys.stderr)


class Relay:
    """Carries packets between a TUN interface on each of two hosts, each `seconds` late. (The kernel's
    own delay, netem, is not in every kernel.)"""

    def __init__(self, a, b, seconds):
        self._seconds = seconds
        self._stop, self._wake = os.pipe()
        self._fds = [self._open(a), self._open(b)]
        for me, other in ((a, b), (b, a)):
            run("ip", "-n", me.name, "addr", "add", f"10.78.0.{me.number}", "peer", f"10.78.0.{other.number}",
                "dev", "slow0")
            run("ip", "-n", me.name, "link", "set", "slow0", "up", "mtu", "9000")
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    @staticmethod
    def _open(host):
        """The descriptor belongs to the namespace in which it was opened."""
        opened = []

        def inside():
            # A thread of its own: the namespace is a thread's.
            libc = ctypes.CDLL(None, use_errno=True)
            with open(f"/run/netns/{host.name}") as namespace:
                if libc.setns(namespace.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
                    opened.append(OSError(ctypes.get_errno(), "setns"))
                    return
            try:
                fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                # IFF_TUN | IFF_NO_PI
                fcntl.ioctl(fd, 0x400454CA, struct.pack("16sH22x", b"slow0", 0x1001))
                opened.append(fd)
            except OSError as e:
                opened.append(e)

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        if isinstance(opened[0], OSError):
            raise Missing(f"NO TUN INTERFACE: {opened[0]}")
        return opened[0]

    def _carry(self):
        queue = []  # (when, to, packet), in order
        with selectors.DefaultSelector() as selector:
            selector.register(self._stop, selectors.EVENT_READ)
            for fd, other in zip(self._fds, reversed(self._fds)):
                selector.register(fd, selectors.EVENT_READ, other)
            while True:
                wait = max(0, queue[0][0] - time.monotonic()) if queue else None
                for key, _ in selector.select(wait):
                    if key.fd == self._stop:
                        return
                    for _ in range(64):
                        try:
                            packet = os.read(key.fd, 1 << 16)
                        except BlockingIOError:
                            break
                        queue.append((time.monotonic() + self._seconds, key.data, packet))
                now = time.monotonic()
                due = 0
                while due < len(queue) and queue[due][0] <= now:
                    try:
                        os.write(queue[due][1], queue[due][2])
                    except OSError:
                        pass  # as a network does
                    due += 1
                del queue[:due]

    def close(self):
        os.write(self._wake, b"x")
        self._thread.join(timeout=10)
        for fd in (*self._fds, self._stop, self._wake):
            os.close(fd)
