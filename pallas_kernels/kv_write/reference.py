"""The specification of a KV write: a scatter of rows. XLA does it in place on CPUs and GPUs."""

from pallas_kernels.narrow import to_page_dtype
from pallas_kernels.paging import write_rows


def kv_write(k_pages, v_pages, k, v, page_table, start, count):
    return tuple(
        write_rows(pool, to_page_dtype(rows, pool.dtype), page_table, start, count)
        for pool, rows in ((k_pages, k), (v_pages, v))
    )
