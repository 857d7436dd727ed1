# SPDX-License-Identifier: Apache-2.0
"""Mooncake's transfer engine over TCP: this process reads scattered blocks out of a second one's
memory. MC_* chooses the settings."""
import argparse
import multiprocessing as mp
import os
import time

import common


def engine():
    from mooncake.engine import TransferEngine
    made = TransferEngine()
    if made.initialize("127.0.0.1:0", "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("TransferEngine.initialize() failed")
    return made


def target(pool, pipe):
    here = engine()
    memory = common.Memory(pool)
    memory.words[:] = common.pattern(0, pool // 8)
    if here.register_memory(memory.address, pool) != 0:
        raise RuntimeError("register_memory() failed")
    pipe.send((f"127.0.0.1:{here.get_rpc_port()}", memory.address))
    try:
        pipe.recv()
    except EOFError:
        pass
    os._exit(0)


class Mooncake:
    def __init__(self, args):
        self.lines = common.Lines()
        self.split = args.split
        spawn = mp.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.target = spawn.Process(target=target, args=(args.pool, theirs), daemon=True)
        self.target.start()
        theirs.close()
        begin = time.perf_counter()
        self.engine = engine()
        created = time.perf_counter()
        self.memory = common.Memory(args.pool)
        if self.engine.register_memory(self.memory.address, args.pool) != 0:
            raise RuntimeError("register_memory() failed")
        if not self.pipe.poll(120):
            raise TimeoutError("the target did not start within 120 s")
        self.session, self.there = self.pipe.recv()
        self.block_size = 4096
        loading = time.perf_counter()
        self.read([0], [0])
        self.setup = {"create_ms": (created - begin) * 1e3,
                      "peer_ms": (time.perf_counter() - loading) * 1e3,
                      "peer_is": "the first read, which includes the handshake"}

    def pids(self):
        return [os.getpid(), self.target.pid]

    def case(self, block_size, blocks):
        self.block_size = block_size
        self.blocks = common.Blocks(self.memory.bytes, block_size, blocks)
        return {}

    def read(self, to, source):
        size = self.block_size
        here = [self.memory.address + slot * size for slot in to]
        there = [self.there + slot * size for slot in source]
        lengths = [size] * len(to)
        step = self.split or len(to)
        begin = time.perf_counter()
        for i in range(0, len(to), step):
            rc = self.engine.batch_transfer_sync_read(self.session, here[i:i + step], there[i:i + step],
                                                      lengths[i:i + step])
            if rc != 0:
                raise RuntimeError(f"batch_transfer_sync_read() gave {rc}")
        return time.perf_counter() - begin

    def move(self, compared):
        to, source = self.blocks.pick(), self.blocks.pick()
        if compared:
            common.clear(self.memory, to, self.block_size)
        seconds = self.read(to, source)
        if compared:
            common.compare(self.memory, to, source, self.block_size)
        return {"seconds": seconds}

    def latency(self, rounds, block_size):
        self.case(block_size, 1)
        times = []
        for i in range(rounds + 20):
            to, source = self.blocks.pick(), self.blocks.pick()
            begin = time.perf_counter()
            rc = self.engine.transfer_sync_read(self.session, self.memory.address + to[0] * block_size,
                                                self.there + source[0] * block_size, block_size)
            seconds = time.perf_counter() - begin
            if rc != 0:
                raise RuntimeError(f"transfer_sync_read() gave {rc}")
            if i == 0:
                common.compare(self.memory, to, source, block_size)
            if i >= 20:
                times.append(seconds)
        return {"waiting": "spinning", **common.percentiles(times)}

    def registration(self, regions):
        made = []
        def register(address, nbytes):
            if self.engine.register_memory(address, nbytes) != 0:
                raise RuntimeError("register_memory() failed")
            made.append(address)
        memory, result = common.register_many(register, regions)
        for address in made:
            self.engine.unregister_memory(address)
        del memory
        return result

    def end(self):
        self.pipe.close()
        self.target.join(5)
        if self.target.is_alive():
            self.target.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool", type=int, required=True, help="bytes on either side")
    parser.add_argument("--split", type=int, default=0, help="most blocks of one batch; 0: all")
    common.serve(Mooncake(parser.parse_args()))
