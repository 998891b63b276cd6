"""medconv/utils/exit_codes.py: the documented codes, which schedulers and scripts of users compare with."""

import re
import signal

from helpers import tiny

from medconv.utils.exit_codes import BUG, DONE, INTERRUPTED, PREEMPTED, USER
from medconv.utils.signals import PREEMPTING


def test_the_readme_names_the_exit_codes():
    paragraph = (tiny.ROOT / "README.md").read_text().partition("Exit codes: ")[2].partition("\n\n")[0]
    codes = [int(code) for code in re.findall(r"(?:^|;\s)(\d+) ", paragraph)]
    assert codes == [DONE, USER, BUG, PREEMPTED, INTERRUPTED]


def test_the_batch_script_requeues_a_preempted_run():
    script = (tiny.ROOT / "scripts/slurm/train.sbatch").read_text()
    aborted = 128 + signal.SIGABRT  # by NCCL's watchdog
    assert re.findall(r'"\$code" -eq (\d+)', script) == [str(aborted), str(PREEMPTED)]
    assert f"code={PREEMPTED}" in script
    signalled = " | ".join(str(128 + number) for number in sorted(PREEMPTING))
    assert f'case "$code" in {signalled}) code={PREEMPTED} ;; esac' in script
