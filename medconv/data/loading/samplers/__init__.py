"""Samplers: which case training sample n shows, and where its patch lies; `conf/sampler/` has the options."""
