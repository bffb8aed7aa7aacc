"""What a job of 1,000 ranks gets done while hosts fail, simulated."""
