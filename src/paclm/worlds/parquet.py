"""Parquet files and Hugging Face data sets, for those who have the packages; paclm does not depend on them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from paclm.errors import CorpusError
from paclm.worlds.records import Row


def read_parquet(path: Path, name: str) -> Iterator[Row]:
    """The rows of a Parquet file, a batch at a time; `name` stands in their sources."""
    parquet = _package("pyarrow.parquet", "pyarrow", f"{path} is a Parquet file, and reading it")
    try:
        table = parquet.ParquetFile(path)
    except ValueError as error:  # pyarrow's own errors are ValueErrors
        raise CorpusError(f"{path} cannot be read as Parquet: {error}. Make or fetch it again.") from None
    number = 0
    for batch in table.iter_batches():
        for fields in batch.to_pylist():
            number += 1
            yield Row(f"{name}:{number}", fields)


def read_dataset(name: str, split: str) -> Iterator[Row]:
    """The rows of one split of a Hugging Face data set."""
    datasets = _package("datasets", "datasets", f"There is no file or folder {name}, and as a Hugging Face data set it")
    try:
        rows = datasets.load_dataset(name, split=split)
    except (OSError, ValueError) as error:  # unknown name, no network, no such split
        raise CorpusError(f"The data set {name} (split {split}) cannot be had: {error}") from None
    for number, fields in enumerate(rows, start=1):
        yield Row(f"{name}[{split}]:{number}", fields)


def _package(module: str, package: str, what: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise CorpusError(f"{what} needs the package {package!r}. Install it with: pip install {package}") from None
