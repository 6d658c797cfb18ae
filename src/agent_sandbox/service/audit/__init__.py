"""The audit trail: hash-chained JSON lines, written before each answer."""

from __future__ import annotations

from .trail import AuditTrail
from .writer import Audit

__all__ = ["Audit", "AuditTrail"]
