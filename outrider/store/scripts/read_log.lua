-- ARGV: start. One script, so that ids and classes are of the same moment.
if not known() then
  return {'NOT_FOUND'}
end
local start = tonumber(ARGV[1])
return {
  'OK',
  redis.call('STRLEN', KEYS[3]),
  redis.call('GETRANGE', KEYS[2], start * 4, -1),
  redis.call('GETRANGE', KEYS[3], start, -1),
  redis.call('GETRANGE', KEYS[4], start, -1),
}
