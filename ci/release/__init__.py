"""What a release needs besides building: tag, change log, bills of materials, licences, and the gate before publishing. Builds nothing."""
