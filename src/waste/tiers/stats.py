"""What a cache did, in counts that explain a token's time."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass
class CacheStats:
    """Counted since the cache was made. Every use of an expert is one of the first four."""

    vram_hits: int = 0  # there when it was asked for
    ram_hits: int = 0
    late: int = 0  # read ahead, and still on its way when it was asked for
    misses: int = 0  # its read had to begin
    reads: int = 0  # records that have come from the drive, whatever for
    bytes_read: int = 0
    prefetch_reads: int = 0  # of these, begun because the lookahead named the expert
    prefetch_useful: int = 0  # asked for by the token they were read for
    prefetch_wasted: int = 0  # not, whoever asked later
    fill_reads: int = 0  # of the reads, in the background for later
    evictions: int = 0  # residents that left memory for another
    promotions: int = 0  # moved to a faster tier
    stall_s: float = 0.0  # seconds in which nothing was left to compute until a record came

    @property
    def hits(self) -> int:
        return self.vram_hits + self.ram_hits

    @property
    def uses(self) -> int:
        return self.hits + self.late + self.misses

    def copy(self) -> CacheStats:
        return replace(self)

    def __sub__(self, before: CacheStats) -> CacheStats:
        """What came to pass since `before`, a copy taken then."""
        return CacheStats(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))
