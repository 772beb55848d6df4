-- ARGV: session TTL ms, fence, start, token ids (4 bytes each), classes (1 byte each), then state fields and values.
local refused = refusal(ARGV[2])
if refused then
  return refused
end
local start, count = tonumber(ARGV[3]), #ARGV[5]
local length = redis.call('STRLEN', KEYS[3])
if start > length then
  return {'GAP', length}
end
-- Only a turn that was begun by the same call may lie behind `start`: a repeat after a lost reply.
if start < length then
  local ids = redis.call('GETRANGE', KEYS[2], start * 4, -1)
  local classes = redis.call('GETRANGE', KEYS[3], start, -1)
  if ids ~= ARGV[4] or classes ~= ARGV[5] then
    return {'CONFLICT', length}
  end
else
  redis.call('APPEND', KEYS[2], ARGV[4])
  redis.call('APPEND', KEYS[3], ARGV[5])
end
redis.call('HSET', KEYS[1], unpack(ARGV, 6))
refresh(ARGV[1])
return {'OK', start + count}
