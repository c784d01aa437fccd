"""Jobs: work that needs a model, asked for by who has none; a durable queue of it on this machine's disk."""

from kvass.jobs.job import Job, model_digest
from kvass.jobs.queue import Jobs, Outcome, Taken
from kvass.jobs.worker import DoJob, Worker

__all__ = ["DoJob", "Job", "Jobs", "Outcome", "Taken", "Worker", "model_digest"]
