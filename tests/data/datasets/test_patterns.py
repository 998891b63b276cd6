"""medconv/data/datasets/patterns.py: case ids and files from patterns."""

import pytest

from medconv.data.datasets.patterns import below_home, files_of, home, is_pattern


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def ids(root, pattern):
    return {case: str(path.relative_to(root)) for case, path in files_of(root / pattern, "images").items()}


def test_an_id_in_the_middle_of_a_name(tmp_path):
    """As in DRIVE: 21_training.tif and 21_manual1.gif."""
    touch(tmp_path, "a/22_training.tif", "a/21_training.tif", "a/notes.txt", "b/21_manual1.gif")
    assert ids(tmp_path, "a/{id}_training.tif") == {"21": "a/21_training.tif", "22": "a/22_training.tif"}
    assert ids(tmp_path, "b/{id}_manual1.gif") == {"21": "b/21_manual1.gif"}


def test_an_ending_in_capitals_is_not_left_out_silently(tmp_path, monkeypatch):
    touch(tmp_path, "1.nii.gz", "2.NII.GZ", "._2.NII.GZ", "NOTES.TXT", "other.JPG", "c/1_a.png", "c/2_a.PNG")
    for pattern, name in (("{id}.nii.gz", "2.NII.GZ"), ("c/{id}_a.png", "2_a.PNG")):
        for root in (f"{tmp_path}/", "./", ""):
            monkeypatch.chdir(tmp_path)
            with pytest.raises(ValueError, match=f"endings must be in small letters, rename {name}$"):
                files_of(f"{root}{pattern}", "images")
    assert list(files_of("c/{id}_a.*", "images")) == ["1", "2"]


def test_a_folder_may_end_in_a_slash_before_another(tmp_path):
    """As from `$DATA/{id}.nii` where DATA ends in a slash."""
    touch(tmp_path, "a/1.nii", "b/1/t1.nii")
    for pattern in (f"{tmp_path}/a//{{id}}.nii", f"{tmp_path}//b/{{id}}//t1.nii"):
        assert list(files_of(pattern, "images")) == ["1"]


def test_a_star_beside_an_id_is_not_part_of_it(tmp_path):
    """Folders of DICOM series whose names carry numbers."""
    for name in ("p1/3-T1post-0042", "p2/7-T1post-0817", "p2/8-T2-0817"):
        (tmp_path / name).mkdir(parents=True)
    assert ids(tmp_path, "{id}/*-T1post-*") == {"p1": "p1/3-T1post-0042", "p2": "p2/7-T1post-0817"}
    assert set(ids(tmp_path, "*/*-T2-*")) == {"p2_8_0817"}
    (tmp_path / "p1/9-T1post-1").mkdir()
    with pytest.raises(ValueError, match=r"p1/3-T1post-0042 and .*p1/9-T1post-1 would both be case p1"):
        files_of(f"{tmp_path}/{{id}}/*-T1post-*", "images")


def test_an_id_is_everywhere_the_same_and_as_long_as_possible(tmp_path):
    touch(tmp_path, "s1/s1_t1.nii", "s2/s1_t1.nii", "x/s_01_t1.nii")
    assert ids(tmp_path, "{id}/{id}_t1.nii") == {"s1": "s1/s1_t1.nii"}
    assert ids(tmp_path, "x/{id}_*.nii") == {"s_01": "x/s_01_t1.nii"}


def test_a_folder_may_have_a_star_in_its_name(tmp_path):
    """As MRI's T2*; `T2x` is another one."""
    touch(tmp_path, "T2*/im/1.nii", "T2x/im/2.nii", "T2*/{id}/3.nii")
    assert ids(tmp_path, "T2*/im/{id}.nii") == {"1": "T2*/im/1.nii"}
    assert ids(tmp_path, "T2*/im/*.nii") == {"1": "T2*/im/1.nii"}
    assert ids(tmp_path, "T2*/im") == {"1": "T2*/im/1.nii"}
    assert ids(tmp_path, "T2*/{id}/*.nii") == {"3": "T2*/{id}/3.nii"}
    assert home(tmp_path / "T2*/im/{id}.nii") == tmp_path / "T2*/im"
    assert not is_pattern(tmp_path / "T2*/im") and is_pattern(tmp_path / "T1*/im")


def test_a_star_that_matches_nothing_is_no_id(tmp_path):
    touch(tmp_path, "img.nii", "img1.nii")
    with pytest.raises(ValueError, match=r"images=.*: nothing in .*img\.nii is left for the case id"):
        files_of(f"{tmp_path}/img*.nii", "images")


def test_messages_name_the_argument(tmp_path):
    with pytest.raises(ValueError, match=r"references=.*/\{id\}_no\.png: no file matches"):
        files_of(tmp_path / "{id}_no.png", "references")
    touch(tmp_path, "a.bmp", "b.bmp", "c.svs")
    with pytest.raises(ValueError, match=r"labels .*: no image there .*the folder holds 2 of \.bmp, 1 of"):
        files_of(tmp_path, "labels")


def test_home_is_the_folder_before_the_first_wildcard():
    homes = {"a/b{id}/c_*": "a", "a/{id}_x.png": "a", "{id}.png": ".", "a/b": "a/b"}
    assert {pattern: str(home(pattern)) for pattern in homes} == homes
    assert [is_pattern(pattern) for pattern in homes] == [True, True, True, False]


@pytest.mark.parametrize(
    ("patterns", "below"),
    [
        (["/data/scans/*_t1.nii.gz"], ["*_t1.nii.gz"]),
        (["scans/{id}/t1.nii", "scans/{id}/flair.nii"], ["{id}/t1.nii", "{id}/flair.nii"]),
        (["/data/t1/{id}.nii", "/data/flair/{id}.nii"], ["t1/{id}.nii", "flair/{id}.nii"]),
    ],
)
def test_patterns_below_the_folder_of_all_files(patterns, below):
    assert below_home(patterns) == tuple(below)
