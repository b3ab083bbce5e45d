/* In the place of the 200 kB that unfold loads on every page: no page of the admin draws a chart with them. */
