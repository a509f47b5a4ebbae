"""Set-up, proof and repair, the stream worker, schedules, status."""
