import numpy as np

from gpipe_hpc.data.names import Names


def test_names_come_back():
    texts = ["a", "", "n01/é.JPEG", "odd\udcff"]
    names = Names(texts)
    assert list(names) == texts and len(names) == 4 and names[2] == texts[2]
    assert list(names.pick(np.array([True, False, False, True]))) == ["a", "odd\udcff"]


def test_digest_knows_where_a_name_ends():
    assert Names(["ab", "c"]).digest(np.arange(2)) != Names(["a", "bc"]).digest(np.arange(2))
    assert Names(["ab"]).digest(np.arange(1)) != Names(["ab"]).digest(np.arange(1, 2))
