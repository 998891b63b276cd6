"""Digests of files."""

import hashlib

from medconv.utils.digests import digest


def test_a_digest_is_the_sha256_of_the_content(tmp_path):
    content = b"abc" * 100_000
    path = tmp_path / "file"
    path.write_bytes(content)
    assert digest(path) == hashlib.sha256(content).hexdigest()
