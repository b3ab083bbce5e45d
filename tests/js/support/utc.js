// UTC as the time zone of date formats. Import this file before the module that creates them.

process.env.TZ = "UTC";
