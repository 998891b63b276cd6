"""What follows from validations without progress: a lower learning rate, or an early end of the run."""
