"""The gate's own benchmark: false alarms, detection and cost of its rule and of today's, on recorded noise."""
