"""medconv/utils/locks.py: processes at work, and pieces of work that only one of them has."""

from medconv.utils.locks import Claims, acquired


def test_a_piece_of_work_belongs_to_one_process(tmp_path):
    one = Claims(tmp_path / "claims")
    other = Claims(tmp_path / "claims")
    one.join()
    assert other.is_shared() and not one.is_shared()
    other.join()
    lock = one.lock("case")
    assert acquired(lock) and not acquired(other.lock("case"))
    lock.release()
    assert acquired(other.lock("case")) and one.is_shared()
    assert not one.leave() and other.leave()
    assert not (tmp_path / "claims").exists()


def test_a_process_that_was_killed_is_not_at_work(tmp_path):
    """Its lock's file stays, without the lock."""
    (tmp_path / "machine-1-2.process").touch()
    claims = Claims(tmp_path)
    assert not claims.is_shared() and not list(tmp_path.iterdir())
