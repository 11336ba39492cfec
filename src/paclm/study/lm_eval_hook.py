"""Make `lm_eval --model paclm` known to releases of lm-eval that look for no entry points. Imports nothing of paclm.

lm-eval reads entry points of the group `lm_eval.models` (paclm declares one) since its pull request 4013; 0.4.13, its
newest release, does not. For it `paclm-lm-eval.pth` calls `install` at the start of a process whose command is
lm_eval, and of no other: one name is added to lm-eval's registry when that is filled.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

TARGET = "paclm.study.lm_eval_model:PaclmLM"
_REGISTRATION = "lm_eval.models"


class AddsModel:
    """Finds nothing itself: runs `register` after the module that fills lm-eval's registry."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _REGISTRATION:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            fill = spec.loader.exec_module

            def fill_and_register(module: ModuleType) -> None:
                fill(module)
                register()

            spec.loader.exec_module = fill_and_register  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Put the name into lm-eval's registry, as a string that is imported when the model is asked for."""
    from lm_eval.api.registry import model_registry

    if "paclm" not in model_registry:
        model_registry.register("paclm", target=TARGET)


def install() -> None:
    """Register now, or once lm-eval fills its registry."""
    if _REGISTRATION in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, AddsModel())
