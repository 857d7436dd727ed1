# SPDX-License-Identifier: Apache-2.0
"""NIXL: this process reads scattered blocks out of a second one's memory. UCX_* chooses the way."""
import argparse
import multiprocessing as mp
import os
import time

import common
import numpy as np


def agent(name, progress):
    from nixl_cu12._api import nixl_agent, nixl_agent_config
    made = nixl_agent(name, nixl_agent_config(enable_prog_thread=progress, backends=[]))
    made.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
    return made


def target(pool, cpu, pipe):
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    here = agent("target", True)  # READ needs it: always to wire up, over tcp and posix for the data
    memory = common.Memory(pool)
    memory.words[:] = common.pattern(0, pool // 8)
    here.register_memory([(memory.address, pool, 0, "")], "DRAM")
    pipe.send((here.get_agent_metadata(), memory.address))
    here.add_remote_agent(pipe.recv())
    pipe.send("ready")
    try:
        pipe.recv()
    except EOFError:
        pass
    os._exit(0)


class Nixl:
    def __init__(self, args):
        self.lines = common.Lines()
        spawn = mp.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.target = spawn.Process(target=target, args=(args.pool, args.target_cpu, theirs), daemon=True)
        self.target.start()
        theirs.close()
        if args.cpu is not None:
            os.sched_setaffinity(0, {args.cpu})
        begin = time.perf_counter()
        self.agent = agent("initiator", args.progress)
        created = time.perf_counter()
        self.memory = common.Memory(args.pool)
        self.agent.register_memory([(self.memory.address, args.pool, 0, "")], "DRAM")
        if not self.pipe.poll(120):
            raise TimeoutError("the target did not start within 120 s")
        metadata, self.there = self.pipe.recv()
        self.pipe.send(self.agent.get_agent_metadata())
        if not self.pipe.poll(60):
            raise TimeoutError("the target did not take our metadata within 60 s")
        self.pipe.recv()
        loading = time.perf_counter()
        self.agent.add_remote_agent(metadata)
        self.agent.make_connection("target")
        self.setup = {"create_ms": (created - begin) * 1e3,
                      "peer_ms": (time.perf_counter() - loading) * 1e3}
        self.lists = {}

    def pids(self):
        return [os.getpid(), self.target.pid]

    def prepared(self, block_size):
        """Lists over all blocks of both pools, as NIXL's documentation recommends; and their cost."""
        if block_size not in self.lists:
            for lists, _ in self.lists.values():
                for handle in lists:
                    handle.release()
            self.lists.clear()
            slots = self.memory.bytes // block_size
            here = np.zeros((slots, 3), dtype=np.uint64)
            here[:, 0] = np.uint64(self.memory.address) + np.arange(slots, dtype=np.uint64) * np.uint64(block_size)
            here[:, 1] = block_size
            there = here.copy()
            there[:, 0] += np.uint64((self.there - self.memory.address) % 2**64)
            begin = time.perf_counter()
            lists = (self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", self.agent.get_xfer_descs(here, "DRAM")),
                     self.agent.prep_xfer_dlist("target", self.agent.get_xfer_descs(there, "DRAM")))
            self.lists[block_size] = lists, (time.perf_counter() - begin) * 1e3
        return self.lists[block_size]

    def case(self, block_size, blocks):
        self.block_size = block_size
        self.blocks = common.Blocks(self.memory.bytes, block_size, blocks)
        _, milliseconds = self.prepared(block_size)
        return {"prepare_ms": milliseconds}

    def read(self, to, source):
        """(making the request, moving the bytes), in seconds."""
        (here, there), _ = self.prepared(self.block_size)
        to, source = np.array(to, dtype=np.int32), np.array(source, dtype=np.int32)
        begin = time.perf_counter()
        request = self.agent.make_prepped_xfer("READ", here, to, there, source)
        made = time.perf_counter()
        state = self.agent.transfer(request)
        give_up = made + 60
        while state == "PROC":
            state = self.agent.check_xfer_state(request)
            if time.perf_counter() > give_up:
                raise TimeoutError("a READ did not end within 60 s")
        done = time.perf_counter()
        if state != "DONE":
            raise RuntimeError(f"a READ ended as {state}")
        self.last = request
        return made - begin, done - made

    def move(self, compared):
        to, source = self.blocks.pick(), self.blocks.pick()
        if compared:
            common.clear(self.memory, to, self.block_size)
        making, seconds = self.read(to, source)
        self.agent.release_xfer_handle(self.last)
        if compared:
            common.compare(self.memory, to, source, self.block_size)
        return {"seconds": seconds, "make_us": making * 1e6}

    def latency(self, rounds, block_size):
        self.case(block_size, 1)
        times = []
        for i in range(rounds + 50):
            to, source = self.blocks.pick(), self.blocks.pick()
            _, seconds = self.read(to, source)
            self.agent.release_xfer_handle(self.last)
            if i == 0:
                common.compare(self.memory, to, source, block_size)
            if i >= 50:
                times.append(seconds)
        return {"waiting": "spinning", **common.percentiles(times)}

    def status(self, calls):
        self.case(4096, 1)
        self.read(self.blocks.pick(), self.blocks.pick())
        begin = time.perf_counter()
        for _ in range(calls):
            self.agent.check_xfer_state(self.last)
        ns = (time.perf_counter() - begin) / calls * 1e9
        self.agent.release_xfer_handle(self.last)
        return {"call": "check_xfer_state() of a finished transfer, from Python", "ns": ns}

    def registration(self, regions):
        made = []
        def register(address, nbytes):
            made.append(self.agent.register_memory([(address, nbytes, 0, "")], "DRAM"))
        memory, result = common.register_many(register, regions)
        for descriptors in made:
            self.agent.deregister_memory(descriptors)
        del memory
        return result

    def end(self):
        self.pipe.close()
        self.target.join(5)
        if self.target.is_alive():
            self.target.kill()


def cpu(text):
    return None if text == "" else int(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool", type=int, required=True, help="bytes on either side")
    parser.add_argument("--cpu", type=cpu, help="CPU of this process")
    parser.add_argument("--target-cpu", type=cpu, help="CPU of the target")
    parser.add_argument("--progress", action="store_true", help="a progress thread here too, NIXL's default")
    common.serve(Nixl(parser.parse_args()))
