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
    by_status = {}
    for case in cases:
        by_status.setdefault(case.get("status"), []).append(case.get("name"))
    passed = len(by_status.pop("run", []))
    not_run = by_status.pop("notrun", []) + by_status.pop("disabled", [])
    failed = [name for names in by_status.values() for name in names]

    notes = pathlib.Path(skipped)
    lines = sorted(set(notes.read_text().splitlines())) if notes.exists() else []
    # ctest says "notrun" for a skipped test, but also for a missing program.
    for case in cases:
        if case.get("name") in not_run:
            why = case.find("skipped")
            message = why.get("message", "") if why is not None else ""
            if "SKIP" in message.upper():
                if not any(line.startswith(case.get("name")) for line in lines):
                    lines.append(f"{case.get('name')}: no reason given")
            elif message != "Disabled":
                failed.append(case.get("name"))
    for name in failed:
        print(f"failed: {name}")
    for line in lines:
        print(f"SKIPPED {line.upper()}")
    print(f"{passed} passed, {len(failed)} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
