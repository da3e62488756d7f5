"""A client of a cluster for Python programs: submit jobs, wait for them, read what they say."""

from slackwater.client.asynchronous import AsyncClient, LogLine
from slackwater.client.happened import Told
from slackwater.client.reports import JobReport, Period
from slackwater.client.synchronous import Client
from slackwater.client.waits import Waited

__all__ = ["AsyncClient", "Client", "JobReport", "LogLine", "Period", "Told", "Waited"]
