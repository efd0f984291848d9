"""The native CPU backend: vectorised kernels over the same layout as the reference one."""

from __future__ import annotations

from headrace.device.attention.backend import AttentionNeeds
from headrace.device.attention.backends.ops_backend import OpsBackend


class CpuNativeBackend(OpsBackend):
    """Attention by the native operators."""

    name = "cpu_native"

    def refuse(self, needs: AttentionNeeds) -> str | None:
        if needs.platform != "cpu":
            return f"runs on cpu, not on {needs.platform}"
        if needs.ops != "native":
            return f"needs the native operators, but {needs.ops} ones are in use"
        if needs.mla:
            return "has no multi-head latent attention"
        if needs.kv_dtype not in ("float32", "float16", "int8"):
            return f"keeps no {needs.kv_dtype} blocks"
        return None
