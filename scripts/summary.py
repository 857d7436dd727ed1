#!/usr/bin/env python3
"""summary.py JUNIT SKIPPED: prints what was skipped, in capitals, then "N passed, N failed".

Fails when a test failed and when none ran."""

import pathlib
import sys
import xml.etree.ElementTree as ET


def main(junit, skipped):
    """Returns the exit status."""
    try:
        cases = list(ET.parse(junit).getroot().iter("testcase"))
    except (OSError, ET.ParseError) as why:
        print(f"ctest left no result: {why}")
        print("0 passed, 1 failed")
        return 1
    notes = pathlib.Path(skipped)
    lines = set(notes.read_text().splitlines()) if notes.exists() else set()
    explained = {line.split(":")[0] for line in lines}

    passed, failed = 0, []
    for case in cases:
        name, status = case.get("name"), case.get("status")
        why = case.find("skipped")
        if status == "run":
            passed += 1
        elif status == "disabled":
            lines.add(f"{name}: disabled")
        # "notrun" is also what ctest says of a missing program or a failed fixture.
        elif status == "notrun" and why is not None and why.get("message", "").startswith("SKIP"):
            # A line may speak for a family: "net.tcp: ..." for net.tcp.loss.
            family = name.removeprefix("static.").split(".")
            prefixes = {".".join(family[:n]) for n in range(1, len(family) + 1)}
            if not prefixes & explained:
                lines.add(f"{name}: no reason given")
        else:
            failed.append(name)
    for name in failed:
        print(f"failed: {name}")
    for line in sorted(lines):
        print(f"SKIPPED {line.upper()}")
    print(f"{passed} passed, {len(failed)} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
