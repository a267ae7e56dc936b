"""The page allocator of one data shard: ints and a deque, no device arrays."""

from collections import deque


class PageAllocator:
    """Hands out page ids 1..num_pages-1; page 0 is the null page and is never handed out."""

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise ValueError(f"a pool needs the null page and at least one more, got {num_pages}")
        self.num_pages = num_pages
        self._free = deque(range(1, num_pages))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages, or None (and no change) when fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.popleft() for _ in range(count)]
        self._used.update(pages)
        return pages

    def free(self, pages: list[int]) -> None:
        """Give pages back. Raises ValueError on a page that is not in use."""
        for page in pages:
            if page not in self._used:
                raise ValueError(f"page {page} is freed but not in use")
            self._used.remove(page)
            self._free.append(page)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is free or used, exactly once."""
        free = list(self._free)
        assert len(set(free)) == len(free), "a page is free twice"
        assert not self._used & set(free), "a page is both free and used"
        assert self._used | set(free) == set(range(1, self.num_pages)), "a page is lost"
