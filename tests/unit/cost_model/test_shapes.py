import pandas as pd
import pytest

from fakedist.cost_model.step import shape_texts
from fakedist.rundir.launch_records import WorkRow
from tests.unit.cost_model.launches_by_hand import COPY, PRODUCT

ATTENTION = WorkRow("fmha", "library", "attention", attention="forward", batch=2, heads=32, kv_heads=8)._replace(
    queries=8192, keys=8192, width=128, value_width=128, causal=True
)


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (PRODUCT, "4096 x 4096 x 4096 TN"),
        (PRODUCT._replace(batch=16, m=512, layout=""), "16 x (512 x 4096 x 4096)"),
        (PRODUCT._replace(groups=8, layout=""), "4096 x 4096 x 4096, 8 groups"),
        (ATTENTION, "2 sequences, 32 heads, 8192 tokens, 128, causal"),
        (
            ATTENTION._replace(batch=1, width=192, window=512),
            "32 heads, 8192 tokens, 192 and 128, causal, window of 512",
        ),
        (ATTENTION._replace(queries=1, causal=False), "2 sequences, 32 heads, 1 queries, 8192 keys, 128"),
        (ATTENTION._replace(batch=0, heads=0, queries=0, width=0, causal=False), "8192 keys"),
        (COPY, ""),
    ],
)
def test_a_shape_says_what_its_work_consists_of(work: WorkRow, text: str) -> None:
    assert shape_texts(pd.DataFrame([work], columns=list(WorkRow._fields))) == [text]
