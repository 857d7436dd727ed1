#!/usr/bin/env python3
"""pull.py LIBRARY: a pull between two processes, from Python on libkvferry.so as cargo builds it.

    cargo build --release && python3 examples/python/pull.py target/release/libkvferry.so

This process is the destination. It starts the source as a second process, which sends engine
metadata and a ticket through a pipe, as an orchestrator would; everything else is kvferry's. The
received bytes are compared one by one. Needs nothing but Python."""

import ctypes
import subprocess
import sys

import kvferry as kvf

# Keys and values of 2 layers, 32 blocks of 16 tokens, 4 heads of 64 bytes, laid out as
# [block, layer, role, token, head, byte].
LAYERS, SLOTS, TOKENS, HEADS, HEAD = 2, 32, 16, 4, 64
ROLE = TOKENS * HEADS * HEAD
LAYER = 2 * ROLE
BLOCK = LAYERS * LAYER

# A request of 70 tokens: its blocks at the source and at the destination.
PROMPT = 70
SOURCE_SLOTS = [30, 2, 17, 5, 0]
DESTINATION_SLOTS = [4, 31, 8, 1, 12]


def content(slot):
    """The bytes that the source has in a block; every block differs at every place."""
    return bytes((slot * 37 + at * 11 + at // 256) % 251 + 1 for at in range(BLOCK))


class Rank:
    """An agent with a pool, a layout of one paged group, and an engine of this one rank."""

    def __init__(self, library, name):
        self.library = library
        config = kvf.init(kvf.kvf_agent_config, name=name.encode(), fingerprint=b"example")
        self.agent = library.make("kvf_agent_create", config)
        config = kvf.init(kvf.kvf_host_pool_config, bytes=SLOTS * BLOCK)
        self.pool = library.make("kvf_host_pool_create", self.agent, config)
        base = ctypes.c_void_p()
        library.call("kvf_pool_memory", self.pool, ctypes.byref(base), None)
        self.base = base.value

        views = []
        for role, offset in ((kvf.ROLE_KEY, 0), (kvf.ROLE_VALUE, ROLE)):
            tensor = kvf.array(kvf.kvf_tensor_desc, [(self.pool.value, offset)])
            view = kvf.init(
                kvf.kvf_view_desc,
                role=role,
                element_bits=16,
                heads=HEADS,
                slots=SLOTS,
                bytes_per_head=HEAD,
                tensors=tensor,
                tensors_elem_size=ctypes.sizeof(kvf.kvf_tensor_desc),
                num_tensors=1,
                slot_stride=BLOCK,
                layer_stride=LAYER,
                token_stride=HEADS * HEAD,
                head_stride=HEAD,
            )
            views.append(view)
        group = kvf.init(
            kvf.kvf_group_desc,
            kind=kvf.GROUP_PAGED,
            tokens_per_block=TOKENS,
            layers=kvf.array(ctypes.c_uint32, list(range(LAYERS))),
            num_layers=LAYERS,
            views=kvf.array(kvf.kvf_view_desc, views),
            views_elem_size=ctypes.sizeof(kvf.kvf_view_desc),
            num_views=len(views),
        )
        desc = kvf.init(
            kvf.kvf_layout_desc,
            groups=kvf.array(kvf.kvf_group_desc, [group]),
            groups_elem_size=ctypes.sizeof(kvf.kvf_group_desc),
            num_groups=1,
        )
        layout = library.make("kvf_layout_create", desc)
        library.call("kvf_agent_set_layout", self.agent, layout)
        library.call("kvf_layout_destroy", layout)
        self.engine = library.make("kvf_engine_create", self.agent, kvf.init(kvf.kvf_engine_desc))

    def block(self, slot):
        """A block's memory, to read and to write."""
        return (ctypes.c_ubyte * BLOCK).from_address(self.base + slot * BLOCK)

    def close(self):
        """Ends everything, the agent first, so that nothing is in use any more."""
        self.library.call("kvf_agent_destroy", self.agent, 5 * kvf.SECOND)
        self.library.call("kvf_engine_destroy", self.engine)
        self.library.call("kvf_pool_destroy", self.pool)


def source(library):
    """Publishes a request and waits until it was fetched. Says one line per thing."""
    rank = Rank(library, "source")
    for slot in SOURCE_SLOTS:
        ctypes.memmove(rank.block(slot), content(slot), BLOCK)
    print(library.collect("kvf_engine_metadata", rank.engine).hex(), flush=True)

    slots = kvf.array(ctypes.c_int32, SOURCE_SLOTS)
    group = kvf.init(
        kvf.kvf_published_group, slots=slots, num_slots=len(slots), token_end=PROMPT
    )
    desc = kvf.init(
        kvf.kvf_publish_desc,
        key=kvf.kvf_key(request=1),
        groups=kvf.array(kvf.kvf_published_group, [group]),
        groups_elem_size=ctypes.sizeof(kvf.kvf_published_group),
        num_groups=1,
    )
    publication = library.make("kvf_publish", rank.agent, desc)
    print(library.collect("kvf_publication_ticket", publication).hex(), flush=True)

    ended = library.call("kvf_publication_wait", publication, 20 * kvf.SECOND)
    library.call("kvf_publication_destroy", publication)
    rank.close()
    print(library.name(ended), flush=True)


def destination(library, metadata, ticket):
    """Pulls the request; returns the bytes of its blocks and what kvferry says about it."""
    rank = Rank(library, "destination")
    peer = library.make("kvf_peer_add", rank.agent, metadata, len(metadata), 0)
    slots = kvf.array(ctypes.c_int32, DESTINATION_SLOTS)
    desc = kvf.init(
        kvf.kvf_pull_desc,
        peer=peer.value,
        ticket=ticket,
        ticket_bytes=len(ticket),
        slots=slots,
        num_slots=len(slots),
        token_end=kvf.TOKEN_END_ALL,
    )
    transfer = library.make("kvf_pull_begin", rank.agent, desc)
    if library.call("kvf_transfer_wait", transfer, 20 * kvf.SECOND) != kvf.OK:
        raise kvf.Error("the pull has not ended after 20 s")
    info = kvf.init(kvf.kvf_transfer_info)
    library.call("kvf_transfer_query", transfer, info, None, 0, 0)
    blocks = {slot: bytes(rank.block(slot)) for slot in range(SLOTS)}
    library.call("kvf_transfer_destroy", transfer)
    library.call("kvf_peer_destroy", peer)
    return rank, info, blocks


def expected():
    """All blocks of the destination: the last one of the request is filled up to the last token."""
    blocks = dict.fromkeys(range(SLOTS), bytes(BLOCK))
    for ordinal, (there, here) in enumerate(zip(SOURCE_SLOTS, DESTINATION_SLOTS)):
        valid = min(TOKENS, PROMPT - ordinal * TOKENS) * HEADS * HEAD
        whole, block = content(there), bytearray(BLOCK)
        for at in range(0, BLOCK, ROLE):
            block[at : at + valid] = whole[at : at + valid]
        blocks[here] = bytes(block)
    return blocks


def main():
    """Returns the exit status."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    library = kvf.Library(sys.argv[1])
    if sys.argv[2:] == ["--source"]:
        source(library)
        return 0
    child = subprocess.Popen(
        [sys.executable, __file__, sys.argv[1], "--source"], stdout=subprocess.PIPE, text=True
    )
    try:
        metadata, ticket = (bytes.fromhex(child.stdout.readline()) for _ in range(2))
        rank, info, blocks = destination(library, metadata, ticket)
        told = child.stdout.readline().strip()
        rank.close()
        child.wait(timeout=20)
    finally:
        child.kill()
    wrong = sorted(slot for slot, block in expected().items() if blocks[slot] != block)
    print(
        f"{info.bytes} bytes through {info.transport.decode()}, the source heard {told}, "
        f"{'every byte is right' if not wrong else f'wrong blocks: {wrong}'}"
    )
    moved = PROMPT * HEADS * HEAD * 2 * LAYERS
    right = not wrong and info.bytes == moved and told == "KVF_OK" and child.returncode == 0
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
