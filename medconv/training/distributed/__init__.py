"""DDP and FSDP: strategies, cluster environments, and what ranks agree on."""
