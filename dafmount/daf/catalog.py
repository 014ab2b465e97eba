"""Frozen values that say what a Daf contains. Knows nothing of files' places or bytes."""

from __future__ import annotations

from dataclasses import dataclass

from dafmount.daf.eltype import is_string

DENSE = ""
"""The key of a dense property's only component."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a component is chunked and compressed (PackedFormat documentation)."""

    packed_format: str
    """`indexed+zipped` (a Zarr index leads the shard) or `zipped`."""
    chunk_shape: tuple[int, ...]
    """Elements of a chunk in each dimension, rows first."""
    compression: str
    compression_level: int | None


@dataclass(frozen=True, slots=True)
class Component:
    """One payload file of a property."""

    key: str
    """`nzind`, `nzval`, `colptr`, `rowval`, or `DENSE`."""
    eltype: str
    n_elements: int | None
    """Elements of a sparse component; None where only the axes (dense) or the file (1.0) tell."""
    packing: Packing | None

    @property
    def flat_suffix(self) -> str:
        """What follows the property's name in the flat file's name."""
        if self.key == DENSE:
            return ".txt" if is_string(self.eltype) else ".data"
        if self.key == "nzval" and is_string(self.eltype):
            return ".nztxt"
        return f".{self.key}"

    @property
    def packed_suffix(self) -> str:
        """What follows the property's name in the shard's name."""
        return ".zip" if self.key == DENSE else f".{self.key}.zip"


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A vector's or matrix's descriptor."""

    layout: str
    """`dense` or `sparse`."""
    components: tuple[Component, ...]
    is_legacy: bool
    """A sparse descriptor in the form of version 1.0."""

    @property
    def is_packed(self) -> bool:
        """Whether any component is packed."""
        return any(component.packing is not None for component in self.components)


@dataclass(frozen=True, slots=True)
class PropertyKey:
    """Where a vector or matrix belongs: `axes` has one name for a vector, rows and columns for a matrix."""

    axes: tuple[str, ...]
    name: str

    @property
    def path(self) -> str:
        """Its path below the root, without suffix; the key in metadata.json."""
        return "/".join(["vectors" if len(self.axes) == 1 else "matrices", *self.axes, self.name])
