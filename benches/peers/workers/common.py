# SPDX-License-Identifier: Apache-2.0
"""What the workers of all peers share: lines of JSON, memory with a pattern, times."""
import json
import os
import random
import statistics
import sys
import time

import numpy as np

FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Lines:
    """Requests on standard input, answers on what was standard output: libraries print to the latter,
    so it leads to standard error by now."""

    def __init__(self):
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def answer(self, message):
        self.out.write(json.dumps(message) + "\n")
        self.out.flush()

    def requests(self):
        for line in sys.stdin:
            yield json.loads(line)


def pattern(first_word, words):
    """Words of the source's memory; each tells where it is from."""
    return np.arange(first_word, first_word + words, dtype=np.uint64) * FACTOR + np.uint64(1)


class Memory:
    """Anonymous memory of whole pages, every one present."""

    def __init__(self, nbytes):
        import mmap
        self.bytes = nbytes
        self.map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.words = np.frombuffer(self.map, dtype=np.uint64)
        self.words[:] = 0
        self.address = self.words.ctypes.data

    def block(self, slot, block_size):
        words = block_size // 8
        return self.words[slot * words:(slot + 1) * words]


class Blocks:
    """Fresh random blocks, none twice in one transfer."""

    def __init__(self, pool_bytes, block_size, blocks):
        self.slots, self.blocks = pool_bytes // block_size, blocks
        if self.slots < blocks:
            raise ValueError(f"{blocks} blocks of {block_size} bytes do not fit in {pool_bytes} bytes")
        self.random = random.Random(7)

    def pick(self):
        return self.random.sample(range(self.slots), self.blocks)


def clear(memory, slots, block_size):
    for slot in slots:
        memory.block(slot, block_size)[:] = 0


def compare(memory, to, source, block_size):
    """Every byte; raises on the first block that differs."""
    words = block_size // 8
    for here, there in zip(to, source):
        if not np.array_equal(memory.block(here, block_size), pattern(there * words, words)):
            raise AssertionError(f"block {here} is not the source's block {there}")


def percentiles(seconds, prefix=""):
    ordered = sorted(seconds)
    return {prefix + "p50_us": statistics.median(ordered) * 1e6,
            prefix + "p99_us": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] * 1e6}


def register_many(register, count, page=4096):
    """Registers `count` pages with a gap between two of them: cost of the first and the last hundred."""
    memory = Memory(2 * page * count)
    times = []
    for i in range(count):
        begin = time.perf_counter()
        register(memory.address + 2 * page * i, page)
        times.append(time.perf_counter() - begin)
    some = min(100, count // 2)
    first, last = statistics.median(times[1:1 + some]), statistics.median(times[-some:])
    return memory, {"regions": count, "first_us": first * 1e6, "last_us": last * 1e6,
                    "last_over_first": last / first, "all_ms": sum(times) * 1e3}


def serve(worker):
    """The main loop: one method of the worker for each request."""
    lines = worker.lines
    lines.answer({"ready": True, "pids": worker.pids(), "setup": worker.setup})
    for request in lines.requests():
        name = request.pop("do")
        if name == "end":
            break
        try:
            lines.answer(getattr(worker, name)(**request))
        except Exception as e:  # the harness decides
            lines.answer({"error": f"{type(e).__name__}: {e}"})
    worker.end()
    sys.stderr.flush()
    os._exit(0)  # some libraries crash in a destructor
