#!/usr/bin/env python3
"""Holds examples/python/kvferry.py against the header: sizes and offsets of its structs against
cpp_tests/struct_layout.inc, its functions and constants against include/kvferry.h."""

import ctypes
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples/python"))
sys.dont_write_bytecode = True
import kvferry as kvf  # noqa: E402


def structs():
    """Yields what differs between a struct there and in C.

    A struct may end where an older header's did: docs/abi.md promises that it is accepted."""
    rows = (ROOT / "cpp_tests/struct_layout.inc").read_text()
    sizes = dict(re.findall(r"^SIZE\((\w+), (\d+)\)", rows, re.M))
    offsets = {}
    for struct, field, offset in re.findall(r"^OFFSET\((\w+), (\w+), (\d+)\)", rows, re.M):
        offsets.setdefault(struct, {})[field] = int(offset)
    ours = {n: t for n, t in vars(kvf).items() if isinstance(t, type) and n.startswith("kvf_")}
    if not ours:
        yield "no struct found"
    for name, kind in ours.items():
        fields = {field: getattr(kind, field).offset for field, _ in kind._fields_}
        in_c = offsets.get(name, {})
        if ctypes.sizeof(kind) not in {int(sizes.get(name, 0)), *in_c.values()}:
            yield f"{name}: {ctypes.sizeof(kind)} bytes, in C {sizes.get(name)}"
        if list(fields.items()) != list(in_c.items())[: len(fields)]:
            yield f"{name}: fields {fields}, in C {in_c}"


def functions_and_constants():
    """Yields functions with another number of arguments than in C, and constants that differ."""
    header = (ROOT / "include/kvferry.h").read_text()
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    for name, arguments in kvf.Library.FUNCTIONS.items():
        declared = re.search(rf"\bkvf_status {name}\(([^;]*?)\)\s*KVF_NOEXCEPT", header)
        count = len(declared[1].split(",")) if declared else "no declaration"
        if count != len(arguments):
            yield f"{name}: {len(arguments)} arguments, in C {count}"
    for ours, theirs in {
        "ABI_VERSION": "KVF_ABI_VERSION",
        "GROUP_PAGED": "KVF_GROUP_PAGED",
        "ROLE_KEY": "KVF_ROLE_KEY",
        "ROLE_VALUE": "KVF_ROLE_VALUE",
        "TOKEN_END_ALL": "KVF_TOKEN_END_ALL",
        "OK": "KVF_OK",
        "IN_PROGRESS": "KVF_IN_PROGRESS",
        "TIMED_OUT": "KVF_TIMED_OUT",
    }.items():
        value = re.search(rf"\b{theirs}\b(?: =)? (-?\d+)", header)
        if not value or int(value[1]) != getattr(kvf, ours):
            yield f"{ours} is {getattr(kvf, ours)}, {theirs} {value and value[1]}"


def main():
    """Returns the exit status."""
    wrong = [*structs(), *functions_and_constants()]
    print("\n".join(wrong) or f"{len(kvf.Library.FUNCTIONS)} functions agree with the header")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
