"""Publishes requests as jobs, reads their events, and resumes their streams."""
