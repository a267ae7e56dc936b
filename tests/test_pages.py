"""The page allocator under any sequence of calls."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dflash_jax.pages import PageAllocator


class Allocation(RuleBasedStateMachine):
    """Fault 34: pages neither leak nor are handed out twice."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(9)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        free = self.pages.num_free
        got = self.pages.allocate(count)
        assert (got is None) == (count > free)
        if got is not None:
            assert len(got) == count and self.pages.num_free == free - count
            self.held.append(got)
        else:
            assert self.pages.num_free == free

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.pages.free(self.held.pop(index))

    @invariant()
    def every_page_has_one_owner(self) -> None:
        self.pages.check_integrity()
        held = [page for pages in self.held for page in pages]
        assert len(set(held)) == len(held) and 0 not in held
        assert len(held) + self.pages.num_free == 8


TestAllocation = Allocation.TestCase


def test_freeing_twice_names_the_page() -> None:
    pages = PageAllocator(3)
    got = pages.allocate(1)
    assert got is not None
    pages.free(got)
    with pytest.raises(ValueError, match=f"page {got[0]} is freed but not in use"):
        pages.free(got)
    with pytest.raises(ValueError, match="page 0 is freed"):
        pages.free([0])


def test_a_pool_of_the_null_page_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one more, got 1"):
        PageAllocator(1)
