"""What clients say and hear: each dialect's requests as checked models, and its answers, whole and streamed."""
