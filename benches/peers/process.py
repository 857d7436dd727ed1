# SPDX-License-Identifier: Apache-2.0
"""A participant of the comparison: a program that answers lines, each within a deadline."""
import json
import os
import queue
import signal
import subprocess
import threading


class Failed(Exception):
    """A participant ended, was too slow or said that something is wrong."""


class Participant:
    """Starts a program; it is ended by its own pid, with the processes that it named."""

    def __init__(self, name, command, environment=None, deadline=120):
        self.name, self.deadline, self.pids = name, deadline, []
        self.process = subprocess.Popen([str(part) for part in command], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        env={**os.environ, **(environment or {})})
        self.lines, self.errors = queue.Queue(), []
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def _read_errors(self):
        for line in self.process.stderr:
            self.errors = (self.errors + [line])[-20:]

    def line(self, deadline=None):
        """The next line, as JSON."""
        try:
            line = self.lines.get(timeout=deadline or self.deadline)
        except queue.Empty:
            raise Failed(f"{self.name}: no answer within {deadline or self.deadline} s") from None
        if line is None:
            self.process.wait(10)
            raise Failed(f"{self.name} ended with {self.process.returncode}: {''.join(self.errors)[-1500:]}")
        try:
            answer = json.loads(line)
        except ValueError:
            raise Failed(f"{self.name} said {line!r}") from None
        if "error" in answer:
            raise Failed(f"{self.name}: {answer['error']}")
        return answer

    def send(self, text):
        try:
            self.process.stdin.write(text + "\n")
            self.process.stdin.flush()
        except OSError:
            self.line(10)  # says why it has ended
            raise Failed(f"{self.name} does not listen") from None

    def ask(self, deadline=None, **request):
        self.send(json.dumps(request))
        return self.line(deadline)

    def ready(self):
        """Waits for a worker's first line."""
        setup = self.line()
        self.pids = setup["pids"]
        return setup["setup"]

    def pause(self):
        """Its threads must not take the machine from who has the turn."""
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)

    def resume(self):
        for pid in self.pids:
            os.kill(pid, signal.SIGCONT)

    def end(self):
        try:
            self.resume()
            self.process.stdin.write('{"do": "end"}\n')
            self.process.stdin.close()
        except OSError:
            pass
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        for pid in self.pids:  # a second process that outlived the first
            if pid != self.process.pid:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass


def cpu_ms(pids):
    """CPU time of all threads of the processes so far."""
    total = 0
    for pid in pids:
        for task in os.listdir(f"/proc/{pid}/task"):
            try:
                with open(f"/proc/{pid}/task/{task}/schedstat") as file:
                    total += int(file.read().split()[0]) / 1e6
            except FileNotFoundError:
                pass  # a thread that has just ended
    return total
