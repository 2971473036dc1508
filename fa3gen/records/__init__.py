"""What was found and when: evidence of verification, records of tuning, and the table written from them."""
