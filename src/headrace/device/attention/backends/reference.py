"""The PyTorch backend: serves every need on the CPU."""

from __future__ import annotations

from headrace.device.attention.backend import AttentionNeeds
from headrace.device.attention.backends.ops_backend import OpsBackend


class ReferenceBackend(OpsBackend):
    """Attention by the reference operators."""

    name = "reference"

    def refuse(self, needs: AttentionNeeds) -> str | None:
        if needs.platform != "cpu":
            return f"runs on cpu, not on {needs.platform}"
        if needs.ops != "reference":
            return f"needs the reference operators, but {needs.ops} ones are in use"
        if needs.mla:
            return "has no multi-head latent attention"
        if needs.kv_dtype not in ("float32", "float16", "bfloat16", "int8"):
            return f"keeps no {needs.kv_dtype} blocks"
        return None
