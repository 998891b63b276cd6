"""Callbacks beside the training loop; `medconv/training/trainer.py` lists all of a run in their order.

Callbacks that are one half of something else stand with the other half:

    CheckpointWriter                        checkpoint/writer.py, with what writes the files
    PerStepSeeding, FinalValidation         checkpoint/resumable_loop.py, with the loop
    StopSync, BroadcastBuffers,
    UnshardForValidation, ResumeStepCheck   distributed.py, for several processes
    StepProfiler, Trace                     medconv/performance/
"""
