"""From a user's settings to a resolved configuration: the one place that gathers model, machine and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.base.logging import get_logger
from headrace.config.resolve import resolve
from headrace.config.sections import EngineConfig, ModelSection
from headrace.device.platform.hardware import detect_hardware
from headrace.model_files.architecture import read_architecture
from headrace.model_files.download import fetch_model

logger = get_logger(__name__)


def load_engine_config(settings: Mapping[str, Any], *, show_progress: bool = True) -> EngineConfig:
    """Find (or fetch) the model and resolve everything.

    Args:
        settings: values by field name (`config.sections`); absent ones are decided.
        show_progress: draw bars while fetching.

    Raises:
        ConfigError: a setting that cannot work.
        ModelFileError: the model is missing, broken or not supported.
    """
    model = settings.get("model", ModelSection().model)
    path = fetch_model(model, settings.get("revision"), show_progress=show_progress)
    hardware = detect_hardware()
    config = resolve(settings, hardware, read_architecture(path), path)
    if config.device.platform == "cpu" and not hardware.native_ops:
        logger.warning(
            "the native CPU kernels are not built, so answers are slow: install a C++ compiler "
            "(Debian: apt-get install g++) and install headrace again"
        )
    return config
