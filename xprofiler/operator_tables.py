"""OperatorTables: one system's tables in aiconfigurator's package, read from their Parquet files.

They are `SYSTEM/FAMILY/ENGINE/VERSION/NAME_perf.parquet`. Latencies are in milliseconds.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from xcore.arrays import Array
from xcore.errors import InputError
from xcore.rows import reading_parquet

if TYPE_CHECKING:
    from pyarrow import Table as ArrowTable

MS = 1e-3
"""Seconds of the tables' unit of time."""


@dataclass
class OperatorTables:
    """One system's tables of one engine's operators."""

    folder: Path
    engine: str
    versions: dict[str, str] = field(default_factory=dict)
    """The version of each table that has been read."""

    def columns(
        self, family: str, name: str, only: Mapping[str, object] = MappingProxyType({}), engine: str | None = None
    ) -> dict[str, Array]:
        """Return the columns of a table's rows that have the values of `only`.

        They are those of the newest version that has such rows.

        Raises:
            InputError: There is no such table or row.
        """
        found = self.find(family, name, only, engine)
        if found is not None:
            return found
        newest, engine = self._read(self._files(family, name, engine)[0]), engine or self.engine
        for column, value in only.items():
            left = _rows(newest, column, value)
            if not left.num_rows:
                known = ", ".join(sorted(map(str, set(newest[column].to_pylist()))))
                raise InputError(
                    f"System '{self.folder.name}' has no {column} {value} in table '{name}' of {engine}: use one of "
                    f"{known}."
                )
            newest = left
        raise InputError(f"System '{self.folder.name}' has an empty table '{name}' of {engine}: pass another --engine.")

    def find(
        self, family: str, name: str, only: Mapping[str, object], engine: str | None = None
    ) -> dict[str, Array] | None:
        """Return what `columns` returns, but None if no version of the table has such rows.

        Raises:
            InputError: There is no such table.
        """
        for file in self._files(family, name, engine):
            rows = self._read(file)
            for column, value in only.items():
                rows = _rows(rows, column, value)
            if rows.num_rows:
                self.versions[name] = file.parent.name
                return {column: rows[column].to_numpy() for column in rows.column_names}
        return None

    def _files(self, family: str, name: str, engine: str | None) -> list[Path]:
        """Return a table's files, newest first."""
        engine = engine or self.engine
        files = (self.folder / family / engine).glob(f"*/{name}_perf.parquet")
        ordered = sorted(files, key=lambda path: _order(path.parent.name), reverse=True)
        if not ordered:
            raise InputError(f"System '{self.folder.name}' has no table '{name}' of {engine}: pass another --engine.")
        return ordered

    @staticmethod
    def _read(file: Path) -> "ArrowTable":
        import pyarrow.parquet as pq

        with reading_parquet(file):
            return pq.read_table(file)


def _rows(table: "ArrowTable", column: str, value: object) -> "ArrowTable":
    """Return a table's rows with a value in a column; all rows if there is no such column."""
    import pyarrow.compute as pc

    return table.filter(pc.equal(table[column], value)) if column in table.column_names else table


def _order(version: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", version)]
