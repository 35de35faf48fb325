"""Public records as users have them."""

import numpy as np
import pytest

from consilience import Public
from consilience.errors import SchemaMismatch


def test_lists_of_rows_are_public_records_like_arrays():
    public = Public([[0.1, 0.2], [0.3, 0.1]], [0, 1])
    assert np.array_equal(public.X, [[0.1, 0.2], [0.3, 0.1]])
    with pytest.raises(SchemaMismatch, match="one row per record"):
        Public([0.1, 0.2], [0, 1])
    with pytest.raises(SchemaMismatch, match="as many labels"):
        Public([[0.1, 0.2]], [0, 1])
