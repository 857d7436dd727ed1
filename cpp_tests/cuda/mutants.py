#!/usr/bin/env python3
"""Each deviation of the library's device code must fail the test that is named beside it, on the
library with fault points; without a deviation that test passes."""

import os
import subprocess
import sys

MUTANTS = [
    # (deviation, program, test, environment)
    ("cuda_no_source_gate", "streams", "Streams.APublicationIsReadWhenItsStreamHasComeSoFar", {}),
    ("cuda_no_destination_gate", "streams", "Streams.EarlierUsersOfTheDestinationsSlotsAreDoneFirst", {}),
    ("cuda_gate_wrong_stream", "streams", "Streams.APublicationIsReadWhenItsStreamHasComeSoFar", {}),
    ("cuda_no_event_wait", "streams", "Streams.APublicationIsReadWhenItsStreamHasComeSoFar", {}),
    ("cuda_no_stream_wait", "streams", "Streams.AStreamThatWaitsGoesOnAfterSuccess", {}),
    ("cuda_keep_context", "streams", "Streams.TheCallersContextIsAsItWas", {}),
    ("cuda_no_copy_wait", "streams", "Streams.ADoneTransfersBytesAreThere", {}),
    (
        "cuda_no_send_wait",
        "memory",
        "Processes/Between.EveryByteArrives/device_to_pool",
        {"KVF_CUDA_DOUBLE_DELAY_US": "50000-50000"},
    ),
    ("cuda_no_ahead", "sockets", "Sockets.CopiesAndSendsOverlapAtBothEnds", {}),
    ("cuda_one_landing", "sockets", "Sockets.CopiesAndSendsOverlapAtBothEnds", {}),
    ("cuda_buffer_before_sent", "sockets", "Sockets.CopiesAndSendsOverlapAtBothEnds", {}),
    ("cuda_overlap", "memory", "DeviceMemory.SourceAndDestinationMustNotOverlap", {}),
    ("cuda_keep_mapping", "memory", "DeviceMemory.ADeadPeersMemoryIsUnmapped", {}),
    (
        "cuda_no_unmap_wait",
        "memory",
        "DeviceMemory.APoolIsNotFreeWhileAStoppedReaderHasItMapped",
        {},
    ),
    ("cuda_keep_pin", "memory", "DeviceMemory.PinnedPoolsAreUnpinnedBeforeTheyMayBeFreed", {}),
    # This test gives the deviation to the reader alone.
    ("cuda_attest_early", "attest", "Attest.AnOfferThatEndsDuringTheCopyIsExpired", {}),
]


def run(program, test, environment):
    command = [program, f"--gtest_filter={test}", "--gtest_brief=1"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def main():
    folder, library = sys.argv[1:]
    wrong = []
    for mutant, program, test, environment in MUTANTS:
        program = os.path.join(folder, f"cuda_{program}_test")
        environment = {**environment, "LD_LIBRARY_PATH": library}
        code, text = run(program, test, environment)
        if code != 0:
            wrong.append(f"without a deviation, {test} fails:\n{text}")
        key = "KVF_MUTANT" if mutant == "cuda_attest_early" else "KVF_FAULT"
        value = mutant if key == "KVF_MUTANT" else f"{mutant}:on"
        code, text = run(program, test, {**environment, key: value})
        if code == 0:
            wrong.append(f"{mutant} survives {test}")
        else:
            print(f"{mutant}: killed by {test}")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
