"""How long ``headrace serve`` takes to a 200 on ``/ready`` and ``headrace --help`` to its text, and what takes it.

``python benchmarks/startup.py [MODEL] [flags of serve]``

The first start fills caches and is not counted; the median of the following ones is. The timeline is
the server's own, from its log.
"""

from __future__ import annotations

import argparse
import http.client
import re
import signal
import socket
import statistics
import subprocess
import sys
import time

CLI = [sys.executable, "-m", "headrace.entrypoints.cli.main"]
TIMEOUT_S = 120.0
POLL_S = 0.005


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def time_help() -> float:
    """Seconds of ``headrace --help``."""
    start = time.perf_counter()
    subprocess.run([*CLI, "--help"], check=True, capture_output=True)
    return time.perf_counter() - start


def is_ready(port: int) -> bool:
    """Whether ``/ready`` answers 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def time_start(words: list[str]) -> tuple[float, list[str]]:
    """Seconds from the command to a 200, and the log's lines about the start."""
    port = free_port()
    start = time.perf_counter()
    command = [*CLI, "serve", *words, "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        while not is_ready(port):
            if process.poll() is not None or time.perf_counter() - start > TIMEOUT_S:
                raise RuntimeError(f"the server did not start: {process.communicate(timeout=10)[1][-2000:]}")
            time.sleep(POLL_S)
        seconds = time.perf_counter() - start
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            log = process.communicate(timeout=20)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            log = process.communicate()[1]
    return seconds, [line for line in log.splitlines() if re.search(r"start|ready on|imports", line)]


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-starts", type=int, default=5)
    args, words = parser.parse_known_args()
    helps = [time_help() for _ in range(5)]
    time_start(words)
    runs = [time_start(words) for _ in range(args.num_starts)]
    for line in runs[-1][1]:
        print(line)
    starts = [seconds for seconds, _ in runs]
    print(f"headrace --help: median {statistics.median(helps):.3f} s, best {min(helps):.3f} s (target 0.2)")
    print(f"serve to /ready: median {statistics.median(starts):.2f} s, best {min(starts):.2f} s (target 3.0)")


if __name__ == "__main__":
    main()
