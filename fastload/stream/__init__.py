"""Prediction on streams of messages: `fastload.predict`, and where messages come from and answers go.

answers: the loop. message: what travels.
"""

from fastload.stream.answers import Answers, predict
from fastload.stream.message import Message, Poison, Sink, Source

__all__ = ["Answers", "Message", "Poison", "Sink", "Source", "predict"]
